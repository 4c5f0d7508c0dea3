"""A plugin of pytest: hypothesis stops at the first example that fails, and looks for no smaller one."""

from hypothesis import Phase, settings

settings.register_profile("unshrunk", phases=[Phase.explicit, Phase.generate])
settings.load_profile("unshrunk")  # the profile that tests/conftest.py makes later begins with it
