"""Protects the benchmark of models: labels follow the planted rules, comparisons are fair, plain models equal."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import hotbed as hb
from benchmarks.first_contact.planted import auc
from benchmarks.models import __main__ as program
from benchmarks.models import report
from benchmarks.models.logs import LOGS, Conflict, Interests, Order, Pairs, Tasks
from benchmarks.models.plain import plain, plain_batch
from benchmarks.models.retrieval import BEST, Retrieval
from benchmarks.models.training import BY_TASK, Clicks, draw, new_model


@pytest.mark.parametrize("name", LOGS)
def test_labels_follow_the_planted_probabilities(name: str) -> None:
    case = Clicks(LOGS[name](4_000, 500, 12_000), ())
    test = case.splits["test"]
    assert abs(test.labels.mean(0) - test.probability.mean(0)).max() < 0.02
    deciles = np.array_split(np.argsort(test.probability[:, 0]), 10)
    for decile in deciles:  # calibrated wherever they are, not only in the mean
        assert test.labels[decile, 0].mean() == pytest.approx(test.probability[decile, 0].mean(), abs=0.06)
    attainable = case.attainable()
    assert 0.7 < attainable["score"] < 0.95
    noisy = test.probability[:, 0] + np.random.default_rng(0).normal(0, 0.2, len(test.labels))
    assert auc(noisy, test.labels[:, 0]) < attainable[f"AUC of {LOGS[name].roles.label}"]
    again = Clicks(LOGS[name](4_000, 500, 12_000), ()).splits["test"]
    assert torch.equal(again.batch.sparse.values, test.batch.sparse.values)
    assert np.array_equal(again.labels, test.labels)


def test_an_interest_is_worth_the_same_in_any_order() -> None:
    log = Interests(2_000, 200, 20_000)
    split = Clicks(log, ()).splits["test"]
    history, item = split.batch.sparse["history"], split.batch.sparse["item"].values.numpy()
    topics = log.topic_of[history.values.numpy()]
    owner = np.repeat(np.arange(len(item)), history.lengths().numpy())
    same = np.bincount(owner, topics == log.topic_of[item][owner], len(item)).astype(int)
    logits = np.log(split.probability[:, 0] / (1 - split.probability[:, 0]))
    expected = 3.5 * (1 - 0.6**same) + 0.4 * log.effects[item] + log.intercept
    np.testing.assert_allclose(logits, expected, atol=1e-6)
    assert int(history.lengths().min()) >= 8 and int(history.lengths().max()) == log.longest


def test_what_follows_the_newest_item_is_clicked() -> None:
    log = Order(2_000, 200, 20_000)
    assert sorted(log.next) == list(range(log.topics)) and not (log.next == np.arange(log.topics)).any()
    split = Clicks(log, ()).splits["test"]
    history = split.batch.sparse["history"]
    newest = log.topic_of[history.values[history.lengths().cumsum(0) - 1].numpy()]
    follows = log.topic_of[split.batch.sparse["item"].values.numpy()] == log.next[newest]
    assert split.labels[follows].mean() > 2 * split.labels[~follows].mean()


def test_purchases_are_some_of_the_clicks() -> None:
    test = Clicks(Tasks(2_000, 200, 20_000), ()).splits["test"]
    clicks, purchases = test.labels.T
    assert (purchases <= clicks).all()
    assert purchases.sum() / clicks.sum() == pytest.approx(Tasks.of_clicks, abs=0.03)
    assert (test.probability[:, 1] < test.probability[:, 0]).all()


def test_two_labels_disagree_as_much_as_they_should() -> None:
    log = Conflict(2_000, 200, 20_000)
    first, second = log.weights
    assert np.linalg.norm(first) == pytest.approx(1) and np.linalg.norm(second) == pytest.approx(1)
    assert first @ second == pytest.approx(Conflict.correlation)
    test = Clicks(log, ()).splits["test"]
    assert test.batch.dense is not None
    x = test.batch.dense.numpy().astype(np.float64)
    for weights, p, labels in zip(log.weights, test.probability.T, test.labels.T, strict=True):
        logits = np.log(p / (1 - p)) - log.intercept
        along = x @ weights
        expected = along + np.sin(along[:, None] * log.rates + log.phases).sum(1)
        effects = 0.3 * log.effects[test.batch.sparse["channel"].values.numpy()]
        np.testing.assert_allclose(logits, expected + effects, atol=1e-4)
        assert labels.mean() == pytest.approx(p.mean(), abs=0.01)


def test_pairs_are_worth_what_a_factorization_machine_says() -> None:
    log = Pairs(2_000, 200, 500)
    test = Clicks(log, ()).splits["test"]
    ids = {name: test.batch.sparse[name].values.numpy() for name in log.counts}
    expected = sum(0.5 * of[ids[name]] for name, of in log.effects.items()) + log.intercept
    for one, other in itertools.combinations(log.counts, 2):
        expected += 0.25 * (log.factors[one][ids[one]] * log.factors[other][ids[other]]).sum(1)
    np.testing.assert_allclose(np.log(test.probability / (1 - test.probability))[:, 0], expected, atol=1e-6)


def test_the_best_hundred_by_the_true_probabilities_are_attainable() -> None:
    case = Retrieval(20, 300, 3_000)
    test = case.splits["test"]
    assert all(len(set(liked)) == 3 for liked in test.liked.tolist())
    topic = test.batch.sparse["topic"].values.numpy()
    assert np.array_equal(topic, case.topic_of[test.batch.sparse["item"].values.numpy()])
    assert (topic[:, None] == test.liked).any(1).mean() == pytest.approx(0.9 + 0.1 * 3 / 20, abs=0.02)
    share = case.within[case.of_topic[0]]
    assert share.sum() == pytest.approx(1)
    ranks = np.argsort(case.of_topic[topic] == test.batch.sparse["item"].values.numpy()[:, None], axis=1)[:, -1]
    assert (ranks == 0).mean() == pytest.approx(share[0], abs=0.03)
    assert 0.6 < case.attainable()["score"] < 0.9


def test_scores_of_all_items_are_those_of_the_model() -> None:
    case = Retrieval(4, 50, 6)
    torch.manual_seed(0)
    tables = [hb.Table("item", case.items, 8, init_bound=0.5), hb.Table("topic", 4, 8, init_bound=0.5)]
    features = [hb.Feature("item", "item"), hb.Feature("topic", "topic")]
    features += [hb.Feature("history", "item", pooling="mean"), hb.Feature("topics", "topic", pooling="mean")]
    model = hb.nn.DLRM(tables, features, 0, bottom=(8,), top=(16, 1), embeddings_to_top=True).eval()
    users, everything = case.splits["test"].batch, torch.arange(case.items)
    with torch.no_grad():
        for user, scores in enumerate(case.dlrm_scores(model, users)):
            expected = model(case.beside(users, everything * 0 + user, everything))[:, 0]
            torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-6)
    assert case.items > BEST


def test_an_interval_is_that_of_paired_seeds() -> None:
    own, other = [0.80, 0.83, 0.81], [0.79, 0.80, 0.80]
    mean, half = report.difference(own, other)
    assert mean == pytest.approx(0.05 / 3)
    assert half == pytest.approx(4.3027 * np.std([0.01, 0.03, 0.01], ddof=1) / math.sqrt(3), rel=1e-4)
    assert report.verdict(own, other) == "does not"  # 0.017 ± 0.029
    assert report.verdict([0.80, 0.83, 0.81], [0.78, 0.80, 0.78]) == "beats"
    assert report.verdict([0.80], [0.1]) == "does not"  # of one seed nothing follows
    assert report.verdict(other, own) == "does not"


def test_a_trial_is_the_same_for_every_model() -> None:
    assert draw(3) == draw(3)
    assert len({draw(trial) for trial in range(8)}) == 8
    log = Tasks(1_000, 1_000, 1_000)
    assert new_model("DLRM", log, draw(0), 2, 0).top[-1].out_features == 2
    assert new_model("DLRM", log, draw(0), 1, 0).embeddings.tables["user"].dim == draw(0).dim
    found = Clicks(log, ()).run(BY_TASK, draw(0), 0)
    assert set(found["test"]) == {"score", *(f"{m} of {n}" for m in ("AUC", "logloss") for n in ("click", "purchase"))}


@pytest.mark.parametrize("kind", ["DCNv2", "DIN", "HSTU"])
def test_plain_models_have_the_same_logits(kind: str) -> None:
    rng = np.random.default_rng(0)
    offsets = torch.tensor([0, 2, 2, 5, 6])  # one is empty
    ids = {"item": torch.tensor([1, 2, 3, 4]), "history": (torch.from_numpy(rng.integers(0, 9, 6)), offsets)}
    tables, item, history = [hb.Table("item", 9, 8, init_bound=0.5)], hb.Feature("item", "item"), "history"
    dense = torch.randn(4, 3)
    if kind == "DCNv2":
        model = hb.nn.DCNv2(tables, [item], 3, bottom=(8,), top=(8, 1))
        batch = hb.Batch(sparse=hb.Jagged.from_dict({"item": ids["item"]}), dense=dense)
    else:
        features = [item, hb.Feature(history, "item")]
        made = {"DIN": {"histories": {history: "item"}}, "HSTU": {"history": history, "item": "item", "dropout": 0.0}}
        model = getattr(hb.nn, kind)(tables, features, max_len=4, **made[kind])
        batch = hb.Batch(sparse=hb.Jagged.from_dict(ids))
    other = plain(model)
    assert not any(isinstance(m, hb.nn.MLP) and m is n for m in model.modules() for n in other.modules())
    torch.testing.assert_close(other(plain_batch(batch, 4)), model(batch), rtol=1e-5, atol=1e-6)


def test_quality_goes_on_where_it_was_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "models.json"
    small = ["quality", "--rows", "400", "--trials", "2", "--seeds", "2", "--logs", "crosses", "--json", str(file)]
    program.main([*small, "--models", "DLRM"])
    first = json.loads(file.read_text())
    assert list(first["planted"]["crosses"]["models"]) == ["DLRM"]
    runs: list[str] = []
    run = Clicks.run
    monkeypatch.setattr(Clicks, "run", lambda self, name, *a: (runs.append(name), run(self, name, *a))[1])
    program.main(small)
    assert runs == ["DCNv2"] * 4  # two trials, and each with another seed
    models = json.loads(file.read_text())["planted"]["crosses"]["models"]
    assert models["DLRM"] == first["planted"]["crosses"]["models"]["DLRM"]
    for model in models.values():
        assert len(model["trials"]) == len(model["finalists"]) == len(model["seeds"]) == 2
        valid = {trial: sum(run["valid"] for run in runs.values()) for trial, runs in model["finalists"].items()}
        assert valid[model["best"]] == max(valid.values()) and model["seeds"] == model["finalists"][model["best"]]
    page = tmp_path / "page.md"
    page.write_text(f"Before.\n{report.BEGIN}\nold\n{report.END}\nAfter.\n")
    program.main(["table", "--json", str(file), "--page", str(page)])
    shown = page.read_text()
    assert "old" not in shown and shown.startswith("Before.") and shown.endswith("After.\n")
    assert "| crosses | DCNv2 |" in shown
    with pytest.raises(SystemExit, match=r"was measured with .*choose another --json"):
        program.main([*small, "--trials", "3"])


def test_rates_of_all_sides(tmp_path: Path) -> None:
    file = tmp_path / "rates.json"
    sizes = {"batch": 16, "rows": 50, "dim": 8, "length": 4, "features": 3, "steps": 1, "rounds": 2}
    program.main(["rates", "--json", str(file), *(a for n, v in sizes.items() for a in (f"--{n}", str(v)))])
    measured = json.loads(file.read_text())["samples/s"]
    assert list(measured) == ["DCNv2", "DIN", "HSTU"]
    for sides in measured.values():
        assert {"hotbed", "plain PyTorch"} <= set(sides)
        assert all(len(of["all"]) == 2 and of["median"] > 0 for of in sides.values())
