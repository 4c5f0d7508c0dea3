"""What every `RowStore` must do. A store's test module subclasses `StoreContract` and says how to make one."""

import torch

from hotbed.ops import BagLayout, RuleStep
from hotbed.ops import reference as oracle
from hotbed.optim import SGD, Moment, RowWiseAdagrad

SLOTS, DIM = 40, 20


class StoreContract:
    def make(self, slots: int, dim: int):
        """An empty store."""
        raise AssertionError("a subclass says how to make its store")

    def filled(self):
        store = self.make(SLOTS, DIM)
        store.initialize(0, seed=5, rows=range(SLOTS), cols=range(DIM), bound=0.5)
        return store

    @staticmethod
    def all_slots(store):
        return torch.arange(SLOTS, device=store.device)

    @staticmethod
    def bags(store, ids):
        """One ragged sum feature over the whole store; `ids` is a list of bags."""
        lengths = torch.tensor([0, *map(len, ids)])
        return BagLayout(
            torch.tensor([i for bag in ids for i in bag], dtype=torch.int64, device=store.device),
            torch.tensor([[0, -1, 0, 0, 0]], device=store.device),
            lengths.cumsum(0)[None].to(store.device),
            None,
            len(ids),
            int(lengths.sum()),
            False,
        )

    def step(self, store, optimizer, ids, grad, gate=1.0):
        hyper = [1.0, 0.1, 1e-8][: 1 + len(optimizer.rule.hyper)]
        step = RuleStep(
            rule=optimizer.rule,
            bases=torch.tensor([0], device=store.device),
            hyper=torch.tensor([hyper], device=store.device),
            inv_scale=torch.ones((), device=store.device),
            gate=torch.tensor(gate, device=store.device),
        )
        store.update(step, store.occurrences(self.bags(store, ids)), grad.to(store.device))

    def test_initial_values_are_those_of_the_table_cells(self):
        store = self.make(10, 8)
        store.initialize(2, seed=9, rows=range(3, 9, 2), cols=range(16, 24), bound=0.25)
        expected = torch.empty(3, 8)
        oracle.initial_values_(expected, seed=9, rows=range(3, 9, 2), cols=range(16, 24), bound=0.25)
        assert torch.equal(store.read(torch.tensor([2, 3, 4], device=store.device)).cpu(), expected)

    def test_lookup_pools_the_rows_that_read_returns(self):
        store = self.filled()
        rows = store.read(self.all_slots(store))
        out = store.lookup(self.bags(store, [[3, 7], [], [39]]))
        assert out.shape == (3, 1, DIM)
        assert torch.equal(out[:, 0], torch.stack([rows[3] + rows[7], torch.zeros_like(rows[0]), rows[39]]))

    def test_write_then_read(self):
        store = self.filled()
        slots = torch.tensor([5, 1], device=store.device)
        values = torch.rand(2, DIM, device=store.device)
        before = store.read(self.all_slots(store))
        store.write(slots, values)
        assert torch.equal(store.read(slots), values)
        before[slots] = values
        assert torch.equal(store.read(self.all_slots(store)), before)

    def test_view_shares_memory(self):
        store = self.filled()
        store.view(slice(4, 6)).fill_(2.0)
        assert torch.equal(
            store.read(torch.tensor([4, 5], device=store.device)), torch.full((2, DIM), 2.0).to(store.device)
        )

    def test_moments_start_at_zero_and_adding_twice_keeps_them(self):
        store = self.filled()
        before = store.nbytes
        for moment in (Moment("row", "row"), Moment("element", "element")):
            store.add_moment(moment)
        slots = self.all_slots(store)
        assert not store.read(slots, "row").any() and store.read(slots, "row").shape == (SLOTS,)
        assert not store.read(slots, "element").any() and store.read(slots, "element").shape == (SLOTS, DIM)
        assert store.nbytes == before + SLOTS * 4 * (1 + DIM)
        store.write(slots[:1], torch.ones(1, device=store.device), "row")
        store.add_moment(Moment("row", "row"))
        assert store.read(slots, "row")[0] == 1

    def test_update_touches_each_distinct_row_once_and_no_other(self):
        store = self.filled()
        store.add_moment(RowWiseAdagrad.rule.moments[0])
        slots = self.all_slots(store)
        before = store.read(slots)
        grad = torch.rand(3, DIM)
        self.step(store, RowWiseAdagrad, [[3, 7], [3], [9]], grad)
        g3 = grad[0] + grad[1]
        moment = store.read(slots, "sum_of_squares").cpu()
        assert moment.nonzero().flatten().tolist() == [3, 7, 9]
        torch.testing.assert_close(moment[3], (g3 * g3).mean())
        expected = before[3].cpu() - 0.1 * g3 / (moment[3].sqrt() + 1e-8)
        after = store.read(slots)
        torch.testing.assert_close(after[3].cpu(), expected)
        untouched = [s for s in range(SLOTS) if s not in (3, 7, 9)]
        assert torch.equal(after[untouched], before[untouched])

    def test_a_closed_gate_touches_nothing(self):
        store = self.filled()
        before = store.read(self.all_slots(store))
        self.step(store, SGD, [[1]], torch.rand(1, DIM), gate=0.0)
        assert torch.equal(store.read(self.all_slots(store)), before)

    def test_repeated_runs_give_the_same_bits(self):
        torch.manual_seed(3)
        ids = torch.randint(0, 5, (20, 8)).tolist()
        grad = torch.randn(20, DIM)

        def run():
            store = self.filled()
            store.add_moment(RowWiseAdagrad.rule.moments[0])
            self.step(store, RowWiseAdagrad, ids, grad)
            return store.read(self.all_slots(store))

        assert torch.equal(run(), run())

    def test_to_the_same_device_is_the_store_itself(self):
        store = self.filled()
        assert store.to(store.device) is store
