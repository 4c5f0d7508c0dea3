import pytest

from hotbed.bench import limits, meter


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test depends on a time, so caches need not be emptied."""
    monkeypatch.setattr(meter, "EVICT_BYTES", 1 << 16)
    monkeypatch.setattr(limits, "COPY_BYTES", 1 << 16)
