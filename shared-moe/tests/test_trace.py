import math
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from shared_moe.errors import InputError, MissingExtra, ShapeError, UnreadableError
from shared_moe.experts import FFNExperts
from shared_moe.layer import MoE
from shared_moe.routing import Routing, TopKRouter
from shared_moe.trace import RoutingTrace


def routing(ids, E, weights=None, probs=None):
    ids = torch.as_tensor(ids, dtype=torch.int64)
    T = ids.shape[0]
    probs = torch.full((T, E), 1 / E) if probs is None else torch.as_tensor(probs)
    weights = torch.ones(ids.shape) if weights is None else torch.as_tensor(weights)
    return Routing(ids, weights, probs, probs.clamp_min(1e-9).log())


class Model(nn.Module):
    def __init__(self, layers=2, dim=8, E=4, K=2, recompute=False):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.recompute = recompute
        self.blocks = nn.ModuleList(
            MoE(TopKRouter(dim, E, K, generator=g), FFNExperts(dim, 8, E, generator=g)) for _ in range(layers)
        )

    def forward(self, x):
        for block in self.blocks:
            if self.recompute:
                x = checkpoint(lambda x, block=block: block(x)[0], x, use_reentrant=False)
            else:
                x, _ = block(x)
        return x


def same(a: RoutingTrace, b: RoutingTrace) -> None:
    assert a.kinds == b.kinds
    assert a.num_experts == b.num_experts
    assert a.layers == b.layers
    assert a.step == b.step
    assert a.weight_dtype == b.weight_dtype
    assert a.records.keys() == b.records.keys()
    for key, record in a.records.items():
        for name in record.__dataclass_fields__:
            mine, other = getattr(record, name), getattr(b.records[key], name)
            assert mine.dtype == other.dtype, name
            np.testing.assert_array_equal(mine, other, err_msg=name)


def test_watch_records_each_routing_once_by_the_routers_name():
    model, trace = Model(), RoutingTrace()
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    with trace.watch(model):
        model(x)
        model(x)
    assert trace.layers == ["blocks.0.router", "blocks.1.router"]
    assert trace.steps("blocks.0.router") == [0, 1]
    ids, weights = trace.replay("blocks.0.router", 0)
    expected = model.blocks[0].router(x)
    assert torch.equal(ids, expected.expert_ids_TK)
    assert torch.equal(weights, expected.weights_TK)
    model(x)
    assert trace.step == 2


def test_recomputation_under_activation_checkpointing_counts_no_token_twice():
    plain, recomputed = RoutingTrace(), RoutingTrace()
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
    for model, trace in ((Model(), plain), (Model(recompute=True), recomputed)):
        with trace.watch(model):
            model(x).sum().backward()
    same(plain, recomputed)


def test_replay_sends_tokens_to_the_same_experts_with_the_same_answer():
    model, trace = Model(layers=1), RoutingTrace()
    x = torch.randn(7, 8, generator=torch.Generator().manual_seed(2))
    with trace.watch(model):
        y = model(x)
    ids, weights = trace.replay("blocks.0.router", 0)
    block = model.blocks[0]
    again = block.experts(x, Routing(ids, weights, torch.ones(7, 4), torch.ones(7, 4)))
    assert torch.equal(again, y)


def test_hooks_are_gone_after_watching_even_after_an_error():
    model, trace = Model(), RoutingTrace()
    with pytest.raises(RuntimeError, match="stop"), trace.watch(model):
        raise RuntimeError("stop")
    assert not any(m._forward_hooks for m in model.modules())


traces = st.builds(
    dict,
    layers=st.lists(st.text(max_size=6), min_size=0, max_size=3, unique=True),
    T=st.integers(0, 6),
    K=st.integers(0, 3),
    E=st.sampled_from([1, 3, 40_000]),
    steps=st.integers(1, 3),
    labelled=st.booleans(),
    dtype=st.sampled_from(["float32", "float16"]),
    seed=st.integers(0, 2**31),
)


@settings(max_examples=60, deadline=None)
@given(traces)
def test_any_trace_round_trips_through_parquet(tmp_path_factory, made):
    g = torch.Generator().manual_seed(made["seed"])
    T, K, E = made["T"], made["K"], made["E"]
    trace = RoutingTrace(made["dtype"])
    for _ in range(made["steps"]):
        for layer in made["layers"]:
            ids = torch.randint(-1, E, (T, K), generator=g)
            probs = torch.rand(T, E, generator=g)
            kinds = [["", "α", "space"][int(i)] for i in torch.randint(0, 3, (T,), generator=g)]
            trace.record(
                layer,
                routing(ids, E, torch.randn(T, K, generator=g), probs / probs.sum(1, keepdim=True)),
                kinds if made["labelled"] else None,
            )
        trace.step += 1
    path = trace.save(tmp_path_factory.mktemp("t") / "trace.parquet")
    loaded = RoutingTrace.from_file(path)
    if T:
        same(trace, loaded)
    else:
        assert loaded.layers == trace.layers
        assert loaded.records == {}


def test_ids_and_weights_are_kept_small():
    trace = RoutingTrace("float16")
    trace.record("a", routing([[0, 5]], 6))
    trace.record("b", routing([[0, 39_999]], 40_000))
    assert trace.records["a", 0].ids_TK.dtype == np.int16
    assert trace.records["b", 0].ids_TK.dtype == np.int32
    assert trace.records["a", 0].weights_TK.dtype == np.float16


def test_load_dead_experts_and_entropy_by_hand():
    trace = RoutingTrace()
    trace.record("l", routing([[0, 1], [0, -1], [0, 4]], 4, probs=[[1.0, 0, 0, 0]] * 3))
    np.testing.assert_allclose(trace.load("l"), [0.75, 0.25, 0, 0])
    assert trace.dead_experts("l") == [2, 3]
    assert trace.dead_experts("l", share=0.25) == [1, 2, 3]
    assert trace.entropy("l") == 0
    trace.step = 1
    trace.record("l", routing([[2, 3]], 4))
    np.testing.assert_allclose(trace.load("l"), [3 / 6, 1 / 6, 1 / 6, 1 / 6])
    np.testing.assert_allclose(trace.load("l", 1), [0, 0, 0.5, 0.5])
    assert trace.entropy("l", 1) == pytest.approx(math.log(4))
    assert trace.entropy("l") == pytest.approx(math.log(4) / 4)


def test_entropy_is_that_of_the_distribution_scaled_to_one():
    trace = RoutingTrace()
    trace.record("l", routing([[0]], 2, probs=[[0.9, 0.9]]))
    assert trace.entropy("l") == pytest.approx(math.log(2))


def test_specialisation_is_mutual_information():
    trace = RoutingTrace()
    kinds = ["a", "b", "c"] * 4
    trace.record("exact", routing([[i % 3] for i in range(12)], 3), kinds)
    trace.record("blind", routing([[i // 3 % 3] for i in range(9)], 3), kinds[:9])
    trace.record("unlabelled", routing([[0]], 3))
    assert trace.specialisation("exact") == pytest.approx(math.log(3))
    assert trace.specialisation("blind") == pytest.approx(0, abs=1e-12)
    assert math.isnan(trace.specialisation("unlabelled"))
    names, share = trace.by_kind("exact")
    assert names == ["a", "b", "c"]
    np.testing.assert_array_equal(share, np.eye(3))


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 2**31))
def test_specialisation_bounds_and_invariance_to_renaming_experts(E, n_kinds, seed):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, E, (30, 2))
    kinds = [str(k) for k in rng.integers(0, n_kinds, 30)]
    order = rng.permutation(E)
    trace = RoutingTrace()
    trace.record("l", routing(ids, E), kinds)
    trace.record("renamed", routing(order[ids], E), kinds)
    value = trace.specialisation("l")
    assert 0 <= value <= min(math.log(E), math.log(n_kinds)) + 1e-9
    assert trace.specialisation("renamed") == pytest.approx(value)


def test_a_layer_used_twice_in_one_step_is_appended():
    trace = RoutingTrace()
    trace.record("l", routing([[0], [1]], 2))
    trace.record("l", routing([[1]], 2))
    assert trace.records["l", 0].token_T.tolist() == [0, 1, 2]
    with pytest.raises(ShapeError, match="had 1 slots"):
        trace.record("l", routing([[0, 1]], 2))
    with pytest.raises(ShapeError, match="had 2 experts before, now 3"):
        trace.record("l", routing([[0]], 3))
    with pytest.raises(ShapeError, match="routed 1 tokens, but there are 2 kinds"):
        trace.record("l", routing([[0]], 2), ["a", "b"])


def test_unknown_layers_and_steps_are_answered_with_those_there_are():
    trace = RoutingTrace()
    with pytest.raises(InputError, match="there are: none"):
        trace.load("l")
    trace.record("l", routing([[0]], 2))
    with pytest.raises(InputError, match=r"no layer 'm'.*there are: l"):
        trace.specialisation("m")
    with pytest.raises(InputError, match=r"not recorded in step 3; there are \[0\]"):
        trace.replay("l", 3)
    with pytest.raises(InputError, match="weight_dtype"):
        RoutingTrace("int8")


def write(path, **columns):
    pq.write_table(pa.table(columns), path)
    return path


def test_a_file_from_elsewhere_is_read_by_its_columns(tmp_path):
    path = write(
        tmp_path / "a.parquet",
        layer=["x", "w", "x"],
        step=[4, 0, 4],
        token=[7, 0, 9],
        expert_ids=[[2, 0], [1], [0, -1]],
        weights=[[0.5, 0.5], [1.0], [1.0, 0.0]],
    )
    trace = RoutingTrace.from_file(path)
    assert trace.layers == ["x", "w"]
    assert trace.num_experts == {"x": 3, "w": 2}
    assert trace.step == 5
    assert trace.records["x", 4].token_T.tolist() == [7, 9]
    np.testing.assert_allclose(trace.load("x"), [2 / 3, 0, 1 / 3])
    assert math.isnan(trace.entropy("x"))


GOOD = {"layer": ["l"], "step": [0], "token": [0], "expert_ids": [[0]], "weights": [[1.0]]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"weights": None, "token": None},
            r"missing columns \['token', 'weights'\].*this file has \['layer'",
        ),
        ({"weights": [[1.0, 2.0]]}, "as many values"),
        ({"expert_ids": [0]}, "column of lists"),
        ({"expert_ids": [[-2]]}, "holds -2"),
        ({"expert_ids": [[None]]}, "empty values"),
        ({"step": ["first"]}, "not a routing trace"),
        ({"layer": [None]}, "'layer' has 1 empty cells"),
        (
            {k: v * 2 for k, v in GOOD.items()}
            | {"expert_ids": [[0], [0, 1]], "weights": [[1.0], [1.0, 1.0]]},
            "different numbers",
        ),
    ],
)
def test_files_that_are_no_trace_get_one_clear_error(tmp_path, changes, message):
    columns = {k: v for k, v in (GOOD | changes).items() if v is not None}
    with pytest.raises(UnreadableError, match=message):
        RoutingTrace.from_file(write(tmp_path / "a.parquet", **columns))


def test_truncated_and_absent_files(tmp_path):
    trace = RoutingTrace()
    trace.record("l", routing([[0]], 2))
    path = trace.save(tmp_path / "a.parquet")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UnreadableError, match=r"a\.parquet: not a readable Parquet file"):
        RoutingTrace.from_file(path)
    with pytest.raises(UnreadableError, match=r"gone\.parquet"):
        RoutingTrace.from_file(tmp_path / "gone.parquet")


def test_a_missing_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtra, match=r"shared-moe\[trace\]"):
        RoutingTrace().save(tmp_path / "a.parquet")
