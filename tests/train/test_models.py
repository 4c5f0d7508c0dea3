"""Every model of `hotbed.nn` under every plan, in any memory, saved, gone on with, exported and served."""

from __future__ import annotations

import pytest

from hotbed.config import Component
from hotbed.data import Schema, SparseColumn
from hotbed.testing.model import ModelContract
from hotbed.testing.processes import World
from tests.ranks import Ranks

USER = SparseColumn(name="user", rows=60)
ITEM = SparseColumn(name="item", rows=40)
HISTORY = SparseColumn(name="history", rows=40, table="item", ids=None, pooling="none")
BOUGHT = SparseColumn(name="bought", rows=40, table="item", ids=None, pooling="mean")
SHOP = SparseColumn(name="shop", rows=20, ids=2)
POOLED = Schema(sparse=(USER, ITEM, BOUGHT, SHOP), dense=("age", "price"), labels=("click",))
SEQUENCE = Schema(sparse=(HISTORY, ITEM), labels=("click",))


class Contract(ModelContract):
    schema = POOLED

    @pytest.fixture
    def world(self, ranks: Ranks) -> World:
        return ranks.run


@pytest.mark.full
class TestDLRM(Contract):
    model = Component(class_path="hotbed.nn.DLRM", init_args={"bottom": [8, 32], "top": [16, 1]})


@pytest.mark.full
class TestDLRMEnsemble(Contract):
    model = Component(class_path="hotbed.nn.DLRMEnsemble", init_args={"members": 2, "bottom": [8, 16], "top": [16, 1]})


@pytest.mark.full
class TestWideDeep(Contract):
    model = Component(class_path="hotbed.nn.WideDeep", init_args={"top": [16, 1]})


@pytest.mark.full
class TestDCNv2(Contract):
    model = Component(
        class_path="hotbed.nn.DCNv2", init_args={"layers": 2, "low_rank": 4, "bottom": [8, 16], "top": [16, 1]}
    )


@pytest.mark.full
class TestDeepFM(Contract):
    model = Component(class_path="hotbed.nn.DeepFM", init_args={"top": [16, 1]})


class TestDIN(Contract):
    model = Component(
        class_path="hotbed.nn.DIN",
        init_args={"histories": {"history": "item"}, "max_len": 4, "attention": [8], "top": [16, 1]},
    )
    schema = Schema(sparse=(USER, HISTORY, ITEM, SHOP), dense=("age",), labels=("click",))


@pytest.mark.full
class TestSASRec(Contract):
    model = Component(
        class_path="hotbed.nn.SASRec", init_args={"history": "history", "item": "item", "max_len": 4, "heads": 2}
    )
    schema = SEQUENCE


@pytest.mark.full
class TestHSTU(Contract):
    model = Component(
        class_path="hotbed.nn.HSTU", init_args={"history": "history", "item": "item", "max_len": 4, "heads": 2}
    )
    schema = SEQUENCE


@pytest.mark.full
class TestTwoTower(Contract):
    model = Component(class_path="hotbed.nn.TwoTower", init_args={"item": ["item", "shop"], "widths": [16, 8]})
