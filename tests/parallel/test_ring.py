"""Rings of devices: equal to attention on one, in every order and with every option; what travels, and what is skipped."""

from __future__ import annotations

import collections
import dataclasses
import functools
import importlib
import itertools
import pathlib
import re
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import SMALL_TILES, compiling_quickly, essentials, judged, needs_compiler, normal, references
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jflash
from jflash import machine_code
from jflash.kernels import Triton
from jflash.merge import merged
from jflash.parallel.partition import Everywhere
from jflash.parallel.ring import Ring
from jflash.proof import accuracy
from jflash.proof.cases import Case
from jflash.reference import Online
from jflash.reference.online import unseen
from jflash.score import visits
from jflash.score.score import Score
from jflash.tile import Norm

QUICK = {"block_sizes": SMALL_TILES}
quick = pytest.mark.usefixtures("_quick")


@pytest.fixture
def _quick():
    with compiling_quickly():
        yield


def mesh_of(**axes: int) -> Mesh:
    count = int(np.prod(list(axes.values())))
    return jax.make_mesh(tuple(axes.values()), tuple(axes), (AxisType.Auto,) * len(axes), devices=jax.devices()[:count])


def on_ring(case: Case, mesh: Mesh, order: str, axis="ring", check_vma=True, batch=None, heads=None, **how) -> accuracy.Outputs:
    """The outputs of ring_attention on a case, whole and in the order of positions."""
    size = mesh.size // int(np.prod([mesh.shape[x] for x in (batch, heads) if x]))
    there, back = (jflash.zigzag, jflash.unzigzag) if order == "zigzag" else (lambda x, size, axis: x,) * 2
    options = {name: value for name, value in case.options().items() if name in ("causal", "window", "scale", "softcap")}
    tokens, rows, ids = P(batch, axis, heads), P(batch, heads, axis), P(batch, axis)
    segments = case.options().get("segment_ids", ())

    def fn(q, k, v, sinks=None):
        def share(q, k, v, segments, sinks):
            return jflash.ring_attention(
                q,
                k,
                v,
                axis_name=axis,
                order=order,
                segment_ids=segments or None,
                sinks=sinks,
                return_lse=True,
                **options,
                **how,
            )

        specs = (tokens, tokens, tokens, ids, P(heads))
        mapped = jax.shard_map(share, mesh=mesh, in_specs=specs, out_specs=(tokens, rows), check_vma=check_vma)
        o, lse = mapped(*(there(x, size, 1) for x in (q, k, v)), tuple(there(x, size, 1) for x in segments), sinks)
        return back(o, size, 1), back(lse, size, 2)

    arrays = [jnp.asarray(x, case.dtype) for x in references(case)[0][:4]]
    dlse = jnp.asarray(references(case)[0][4], jnp.float32)
    parameters = jax.tree.map(lambda x: jnp.asarray(x, case.dtype), case.parameters())
    return jax.jit(functools.partial(accuracy.outputs, fn))(*arrays, dlse, **parameters)


PLAIN = Case(64, 64, head_dim=16)
MIXED = Case(
    64, 64, head_dim=16, v_dim=8, heads=4, causal=True, window=(20, None), segments="packed", sinks=True, softcap=3.0
)  # fmt: skip
GROUPED = Case(64, 64, head_dim=40, heads=4, causal=True, dtype="bfloat16")
of = dataclasses.replace


@quick
@pytest.mark.parametrize(
    ("size", "order", "case"),
    essentials(
        [
            (1, "contiguous", GROUPED),
            (2, "zigzag", GROUPED),
            (2, "contiguous", of(PLAIN, q_len=32, causal=True, window=(5, None))),  # queries that lie before their keys
            (4, "contiguous", MIXED),
            (4, "zigzag", MIXED),
            (4, "zigzag", of(PLAIN, window=(9, 17), segments="unsorted", dtype="float16")),
            (8, "contiguous", of(PLAIN, causal=True, dtype="bfloat16", values="large")),
            (8, "zigzag", of(PLAIN, kv_len=128, causal=True, scale=-0.4)),
        ],
        lambda ring: ring[0] == 2 or ring == (4, "zigzag", MIXED),
        several=True,
    ),
    ids=lambda value: value.name if isinstance(value, Case) else str(value),
)
def test_equals_one_device(size, order, case):
    judged(case, on_ring(case, mesh_of(ring=size), order, **QUICK))


@pytest.mark.whole
@quick
@pytest.mark.parametrize(
    ("size", "order", "case"),
    [(2, "zigzag", GROUPED), (4, "contiguous", MIXED)],
    ids=lambda value: value.name if isinstance(value, Case) else str(value),
)
def test_the_kernels_too(size, order, case):
    judged(case, on_ring(case, mesh_of(ring=size), order, implementation="interpret", check_vma=False, **QUICK))


@pytest.mark.whole
@quick
def test_batch_and_heads_are_split_over_other_axes():
    judged(MIXED, on_ring(MIXED, mesh_of(data=2, ring=2, heads=2), "zigzag", batch="data", heads="heads", **QUICK))


@pytest.mark.whole
@quick
def test_a_ring_over_two_axes_of_a_mesh_and_types_that_are_not_checked():
    mesh = mesh_of(hosts=2, ring=2)
    judged(MIXED, on_ring(MIXED, mesh, "contiguous", axis=("hosts", "ring"), check_vma=False, **QUICK))


def test_inputs_without_batch_and_without_tokens():
    fn = functools.partial(jflash.ring_attention, axis_name="ring", return_lse=True, segment_ids=None)
    split = functools.partial(
        jax.shard_map, fn, mesh=mesh_of(ring=2), in_specs=P("ring"), out_specs=(P("ring"), P(None, "ring"))
    )
    q, k = normal(8, 2, 4), normal(8, 2, 4, seed=1)
    for got, want in zip(split()(q, k, k), jflash.attention(q, k, k, return_lse=True), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-6)
    o, lse = split()(q, k[:0], k[:0])
    assert not o.any()
    assert (lse == -jnp.inf).all()


@pytest.mark.whole
def test_float64():
    case = of(PLAIN, causal=True)
    with jax.enable_x64(True):
        arrays, _, x64 = references(case)
        fn = functools.partial(jflash.ring_attention, axis_name="ring", causal=True)
        split = P(None, "ring")
        o = jax.shard_map(fn, mesh=mesh_of(ring=2), in_specs=split, out_specs=split)(*(jnp.asarray(x) for x in arrays[:3]))
        np.testing.assert_allclose(o, x64.o, atol=1e-14)


# ------------------------------------------------------------------------------------------------- what is skipped


@dataclasses.dataclass(frozen=True)
class Counting(Everywhere):
    """Says which device computes a pair of chunks."""

    def for_parts(self):
        return self

    def forward(self, q, k, v, score):
        jax.debug.callback(lambda device: COUNTS.update([int(device)]), jax.lax.axis_index("ring"))
        return super().forward(q, k, v, score)


COUNTS: collections.Counter = collections.Counter()


@quick
@pytest.mark.parametrize(
    ("order", "options", "expected"),
    [
        ("contiguous", {}, (4, 4, 4, 4)),
        ("contiguous", {"causal": True}, (1, 2, 3, 4)),
        ("zigzag", {"causal": True}, (9, 9, 9, 9)),  # pairs of half the size: three of its own keys, two of each visit
        ("contiguous", {"causal": True, "window": (4, 0)}, (1, 2, 2, 2)),
        ("contiguous", {"segments": True}, (2, 2, 2, 2)),
    ],
)
def test_what_would_see_nothing_is_skipped_and_zigzag_is_balanced(order, options, expected, monkeypatch):
    monkeypatch.setattr(importlib.import_module("jflash.ring_attention"), "engine_of", lambda *_: Counting(Online(), Online()))
    COUNTS.clear()
    options = dict(options)
    ids = jnp.repeat(jnp.arange(2), 16)[None] if options.pop("segments", False) else None
    fn = lambda q, ids: jflash.ring_attention(q, q, q, axis_name="ring", order=order, segment_ids=ids, **options)
    split = P(None, "ring")
    jax.block_until_ready(jax.shard_map(fn, mesh=mesh_of(ring=4), in_specs=split, out_specs=split)(normal(1, 32, 1, 4), ids))
    jax.effects_barrier()
    assert tuple(COUNTS[device] for device in range(4)) == expected


@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (3, 0)}, {"window": (0, 6)}, {"causal": True, "window": 9}]
)
def test_keys_travel_as_far_as_anybody_sees_them(chunks, options):
    for size in (1, 2, 3, 5):
        length = 8 * size
        score = Score.of(*(jnp.zeros((1, length, 1, 1)),) * 2, **options)
        position = np.arange(length) if chunks == 1 else jflash.zigzag(np.arange(length), size, axis=0)
        ahead = position[None, :] - position[:, None]
        left, right = (np.inf if x is None else x for x in (score.left, score.right))
        visible = (
            ((-left <= ahead) & (ahead <= right)).reshape(size, chunks, 8 // chunks, size, chunks, 8 // chunks).any((2, 5))
        )
        device, chunk, source, other = np.nonzero(visible)
        share = Score.of(*(jnp.zeros((1, 8, 1, 1)),) * 2, **options)
        steps, pairs = Ring("ring", size, chunks, Online()).plan(share)
        assert steps == 1 + max((device - source) % size)
        assert pairs == sorted(set(zip(chunk.tolist(), other.tolist(), strict=True)))


@pytest.mark.parametrize("offset", [-9, -8, -7, 0, 6, 7, 8])
def test_anything_visible(offset):
    for (left, right), ids in itertools.product([(None, None), (2, 0), (0, 1), (None, 0)], [None, (1, 1), (1, 2)]):
        score = Score(q_len=8, kv_len=7, scale=1.0, left=left, right=right, q_offset=jnp.array([offset], jnp.int32))
        if ids:
            score = score.replace(q_segments=jnp.full((1, 8), ids[0]), kv_segments=jnp.full((1, 7), ids[1]))
        ahead = np.arange(7)[None, :] - offset - np.arange(8)[:, None]
        seen = (ahead >= -(np.inf if left is None else left)) & (ahead <= (np.inf if right is None else right))
        assert bool(visits.anything_visible(score)) == (seen.any() and ids != (1, 2))


# ------------------------------------------------------------------------------------------------- what it is made of


@pytest.mark.whole
@pytest.mark.parametrize("engine", [Online(SMALL_TILES), Triton(SMALL_TILES, interpret=True)], ids=["xla", "interpret"])
def test_parts_are_what_is_rounded_otherwise(engine):
    q, do = (normal(1, 40, 2, 72, seed=seed, dtype=jnp.bfloat16) for seed in (0, 1))
    k, v = (normal(1, 50, 1, 72, seed=seed, dtype=jnp.bfloat16) for seed in (2, 3))
    score = Score.of(q, k, causal=True)
    (o, norm), (part, part_norm) = engine.forward(q, k, v, score), engine.for_parts().forward(q, k, v, score)
    residuals = q, k, v, score, o, norm, do, jnp.zeros_like(norm.m)
    wholes = o, *norm, *engine.backward(*residuals)[:3]
    parts = part, *part_norm, *engine.for_parts().backward(*residuals)[:3]
    for whole, part in zip(wholes, parts, strict=True):
        assert part.dtype == jnp.float32
        assert (whole == part.astype(whole.dtype)).all()


def test_merging_what_has_seen_nothing():
    score = Score(q_len=3, kv_len=3, scale=0.5)
    some = normal(1, 3, 2, 4), Norm(normal(1, 2, 3), jnp.zeros((1, 2, 3)))
    nothing = unseen(some[0], some[0], score, jnp.float32)
    for one, other, want in ((some, nothing, some), (nothing, some, some), (nothing, nothing, nothing)):
        jax.tree.map(np.testing.assert_array_equal, merged(one, other, score.unit), want)


@pytest.mark.whole
def test_a_larger_ring_is_no_larger_program_and_takes_no_more_memory():
    def measured(size):
        fn = functools.partial(jflash.ring_attention, axis_name="ring", causal=True)
        split = P(None, "ring")
        mapped = jax.shard_map(fn, mesh=mesh_of(ring=size), in_specs=split, out_specs=split)
        q = jax.ShapeDtypeStruct((1, 128 * size, 1, 16), jnp.float32)
        traced = jax.jit(jax.grad(lambda q: mapped(q, q, q).sum())).trace(q)
        return len(re.findall("ppermute", str(traced.jaxpr))), traced.lower().compile().memory_analysis().temp_size_in_bytes

    (transfers, small), (same, large) = measured(3), measured(8)
    assert transfers == same
    assert 0 < large <= 1.02 * small


@pytest.mark.parametrize("size", [1, 2, 4])
def test_zigzag_deals_out_an_early_and_a_late_chunk(size):
    x = np.arange(16)
    shares = jflash.zigzag(x, size, axis=0).reshape(size, 2, 8 // size)
    chunks = x.reshape(2 * size, 8 // size)
    for device in range(size):
        np.testing.assert_array_equal(shares[device], chunks[[device, 2 * size - 1 - device]])
    tokens = normal(3, 16, 2)
    np.testing.assert_array_equal(jflash.unzigzag(jflash.zigzag(tokens, size), size), tokens)
    np.testing.assert_array_equal(
        jflash.zigzag(tokens, size), jflash.zigzag(tokens.swapaxes(1, 2), size, axis=-1).swapaxes(1, 2)
    )


# ------------------------------------------------------------------------------------------------- errors

Q = jnp.zeros((1, 8, 2, 4))


def split_over(spec, mesh=None, x=Q, **options):
    fn = functools.partial(jflash.ring_attention, **{"axis_name": "ring", **options})
    return jax.shard_map(lambda q: fn(q, q, q), mesh=mesh or mesh_of(ring=2), in_specs=spec, out_specs=spec)(x)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"axis_name": "rink"}, r"axis_name must be one of the axes of the enclosing jax.shard_map, \('ring',\), got 'rink'"),
        ({"spec": P()}, r"q must be split over 'ring' along its length, but is the same on all devices of \['ring'\]"),
        ({"order": "striped"}, r"order must be one of \('contiguous', 'zigzag'\), got 'striped'"),
        ({"order": "zigzag", "x": Q[:, :6]}, r"q must have an even length on each device in zigzag order, got 3: pad .* of 4"),
        ({"implementation": "naive"}, r"implementation must not be 'naive' in ring_attention"),
        ({"segment_ids": jnp.zeros((1, 3), int)}, r"segment_ids must have the shape \[batch, length\], \(1, 4\), got \(1, 3\)"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_errors(options, message):
    with pytest.raises(ValueError, match=message):
        split_over(**{"spec": P(None, "ring"), **options})


def test_outside_of_shard_map():
    with pytest.raises(ValueError, match=r"must be called inside jax.shard_map, .* axis_name='ring'\), mesh=mesh, in_specs="):
        jflash.ring_attention(Q, Q, Q, axis_name="ring")


@pytest.mark.parametrize(
    ("spec", "dimension"), [(P(None, "ring", None, "other"), "head_dim"), (P(None, ("ring", "other")), "length")]
)
def test_a_dimension_that_is_split_over_another_axis_as_well(spec, dimension):
    mesh = jax.make_mesh((2, 2), ("ring", "other"), (AxisType.Explicit,) * 2, devices=jax.devices()[:4])
    fn = functools.partial(jflash.ring_attention, axis_name="ring")
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=rf"the {dimension} of q must be whole .* split over 'other'"):
        jax.shard_map(lambda q: fn(q, q, q), in_specs=P(None, "ring"), out_specs=P(None, "ring"), axis_names={"ring"})(
            jax.device_put(Q, NamedSharding(mesh, spec))
        )


def test_zigzag_of_a_length_that_does_not_divide():
    with pytest.raises(ValueError, match=r"length of x along axis 1 must be a multiple of 2 \* size, 6, got 8: pad it"):
        jflash.zigzag(Q, 3)


# ------------------------------------------------------------------------------------------------- hosts and GPUs


@pytest.mark.whole
def test_two_hosts():
    """Two processes of two devices each, as two hosts would start them; each compares its share with one device."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    script = pathlib.Path(__file__).with_name("two_hosts.py")
    hosts = [
        subprocess.Popen([sys.executable, script, address, str(n)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for n in range(2)
    ]
    try:
        printed = [host.communicate(timeout=300)[0] for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    for n, (host, text) in enumerate(zip(hosts, printed, strict=True)):
        assert host.returncode == 0, text
        assert f"host {n}: 2 of 4 shares agree" in text


@pytest.mark.whole
@needs_compiler
@pytest.mark.parametrize(("order", "causal"), [("contiguous", False), ("zigzag", True)])
def test_transfers_run_beside_kernels_on_eight_h100s(order, causal):
    shape = (1, 8) if order == "contiguous" else (2, 4)
    mesh, split = Mesh(np.array(machine_code.devices("h100", 8)).reshape(shape), ("data", "ring")), P("data", "ring")
    x = jax.ShapeDtypeStruct((2, 8 * 2048, 2, 64), jnp.bfloat16, sharding=NamedSharding(mesh, split))
    fn = functools.partial(jflash.ring_attention, axis_name="ring", order=order, causal=causal)
    mapped = jax.shard_map(fn, mesh=mesh, in_specs=split, out_specs=split)

    def forward_backward(q, k, v, do):
        o, pull = jax.vjp(mapped, q, k, v)
        return o, *pull(do)

    program = machine_code.compile_for(forward_backward, x, x, x, x, gpu="h100", mesh=mesh)
    loops = [body for body in re.split(r"\n\n", program.text) if re.search(r" collective-permute-start\(", body)]
    loops = [body for body in loops if "ENTRY" not in body]
    assert len(loops) == 2, "one of the forward, one of the backward"
    for body in loops:
        # What a device skips lies behind a conditional, with the kernels in its branch.
        between = body[body.index(" collective-permute-start(") : body.index(" collective-permute-done(")]
        assert re.search(r" conditional\(" if causal else r"__gpu\$xla\.gpu\.triton", between)
    names = {"jflash_forward", "jflash_delta", "jflash_dkv", "jflash_dq"}
    assert names <= {kernel.name for kernel in program.kernels}
