import pytest

from hotbed.measure import machine_profile


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test depends on a time, so caches need not be emptied."""
    monkeypatch.setattr(machine_profile, "EVICT_BYTES", 1 << 16)
    monkeypatch.setattr(machine_profile, "COPY_BYTES", 1 << 16)
