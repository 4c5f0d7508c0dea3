import pytest
import torch

from hotbed import ops
from hotbed.errors import BackendError, BatchError, SpecError
from hotbed.nn import MLP, DotInteraction


def test_mlp_has_the_published_initialisation():
    torch.manual_seed(0)
    mlp = MLP(400, (600, 300), last_relu=False)
    assert [type(layer).__name__ for layer in mlp] == ["Linear", "ReLU", "Linear"]
    assert mlp[0].weight.std().item() == pytest.approx((2 / 1000) ** 0.5, rel=0.02)
    assert mlp[0].bias.std().item() == pytest.approx((1 / 600) ** 0.5, rel=0.1)
    assert isinstance(MLP(4, (2,))[-1], torch.nn.ReLU)


@pytest.mark.parametrize("widths", [(), (0,), (4, -1)])
def test_mlp_refuses_widths_that_cannot_be(widths):
    with pytest.raises(SpecError, match="needs at least one layer and positive widths"):
        MLP(4, widths)


def test_mlp_is_made_on_the_default_device_and_drawn_on_the_cpu():
    with torch.device("meta"):
        assert {p.device.type for p in MLP(4, (3, 2)).parameters()} == {"meta"}
    torch.manual_seed(1)
    first = MLP(4, (3,))[0].weight
    torch.manual_seed(1)
    assert torch.equal(first, torch.empty(3, 4).normal_(0.0, (2 / 7) ** 0.5))


@pytest.mark.parametrize("shapes", [((3, 5), (3, 2, 4)), ((3, 4), (3, 3, 4)), ((1, 4), (3, 2, 4)), ((3, 4), (3, 8))])
def test_interaction_refuses_other_shapes(shapes):
    with pytest.raises(
        BatchError, match=r"DotInteraction\(2, 4\) needs dense \[B, 4\] and embeddings \[B, 2, 4\], got"
    ):
        DotInteraction(2, 4)(*map(torch.rand, shapes))


def by_hand(dense, embeddings, width):
    vectors = torch.cat([dense[:, None], embeddings], 1)
    columns = [dense]
    for i in range(vectors.shape[1]):
        columns += [(vectors[:, i] * vectors[:, j]).sum(1, keepdim=True) for j in range(i)]
    out = torch.cat(columns, 1)
    return torch.cat([out, out.new_zeros(len(out), width - out.shape[1])], 1)


@pytest.mark.parametrize(("features", "dim"), [(26, 128), (3, 10), (1, 1)])
def test_interaction_is_the_padded_lower_triangle(features, dim):
    torch.manual_seed(0)
    layer = DotInteraction(features, dim)
    dense = torch.randn(5, dim, requires_grad=True)
    embeddings = torch.randn(5, features, dim, requires_grad=True)
    ops.launches.clear()
    out = layer(dense, embeddings)
    assert out.shape == (5, layer.width) and layer.width % 8 == 0
    expected = by_hand(dense, embeddings, layer.width)
    torch.testing.assert_close(out, expected)
    upstream = torch.randn_like(out)
    got = torch.autograd.grad(out, (dense, embeddings), upstream)
    torch.testing.assert_close(got, torch.autograd.grad(expected, (dense, embeddings), upstream))
    assert dict(ops.launches) == {"cpu.interaction": 1, "cpu.interaction_backward": 1}


def test_criteo_width_is_padded_from_479_to_480():
    assert DotInteraction(26, 128).width == 480


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_interaction_computes_in_float32_under_cpu_autocast(backend):
    layer = DotInteraction(2, 16, backend=backend)
    dense, embeddings = torch.randn(3, 16), torch.randn(3, 2, 16)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(dense, embeddings)
    torch.testing.assert_close(out, by_hand(dense, embeddings, layer.width))
    assert out.dtype == torch.float32


def test_interaction_needs_an_existing_backend():
    with pytest.raises(BackendError, match="did you mean 'cpu'"):
        DotInteraction(1, 4, backend="cp")(torch.zeros(1, 4), torch.zeros(1, 1, 4))
