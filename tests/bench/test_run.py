from hotbed.bench.run import bar


def test_bars_are_full_at_1_and_never_longer() -> None:
    assert bar(1.0) == bar(1.7) == "██████████"
    assert bar(0.0) == bar(-1.0) == " " * 10
    assert bar(0.5, 4) == "██  "
    assert bar(0.4375, 4) == "█▊  "
    assert len({len(bar(i / 100)) for i in range(120)}) == 1
