import pytest

from hotbed.measure import kernel_times, machine_profile


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test depends on a time, so caches need not be emptied."""
    for module in (kernel_times, machine_profile):
        monkeypatch.setattr(module, "EVICT_BYTES", 1 << 16)
        monkeypatch.setattr(module, "COPY_BYTES", 1 << 16)
