"""Attention on eight devices: the values of one device, results sharded like the arguments, and nothing gathered."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import SMALL_TILES, compiling_quickly, essentials, needs_compiler, normal, references
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jflash import attention, machine_code
from jflash.parallel.shardings import Cut
from jflash.proof import accuracy
from jflash.proof.cases import Case

pytestmark = pytest.mark.usefixtures("quickly_compiled")
MODES = ("shardy", "gspmd", "explicit")


@pytest.fixture(autouse=True)
def partitioner():
    before = jax.config.values["jax_use_shardy_partitioner"]
    yield
    jax.config.update("jax_use_shardy_partitioner", before)


def mesh_of(mode: str, data: int, model: int, devices=None) -> Mesh:
    """A mesh of eight devices with the axes data and model; tells JAX which partitioner to use."""
    jax.config.update("jax_use_shardy_partitioner", mode != "gspmd")
    kind = AxisType.Explicit if mode == "explicit" else AxisType.Auto
    devices = np.array(jax.devices() if devices is None else devices).reshape(data, model)
    return Mesh(devices, ("data", "model"), axis_types=(kind, kind))


def collectives(text: str) -> set[str]:
    """The collective operations of a compiled program."""
    return set(re.findall(r"\b(all-reduce|all-gather|all-to-all|reduce-scatter|collective-\w+)(?:-start)?\(", text))


def compiled(fn, mesh: Mesh, *arguments):
    with jax.set_mesh(mesh):
        return jax.jit(fn).lower(*arguments).compile()


# ------------------------------------------------------------------------------------------- each option

# Nothing to sum over devices: all that has a gradient is as large as batch and heads.
APART = Case(
    40, 45, head_dim=16, batch=4, heads=4, kv_heads=2, segments="packed", q_lengths=(40, 0, 33, 40),
    kv_lengths=(45, 45, 40, 9), mask="bhqk", mask_fn="thirds", bias="bhqk", softcap=4.0, dropout_rate=0.2,
    window=(30, None), causal=True, q_offset=(5, 0, 9, 5),
)  # fmt: skip
# And what serves many batch elements or heads.
SHARED = Case(
    40, 45, head_dim=16, batch=4, heads=4, kv_heads=2, mask="b11k", bias="1hqk", score_fn="alibi", sinks=True, dropout_rate=0.2
)


def spec_of(name: str, x) -> P:
    """Batch over `data`, heads over `model`."""
    if name in ("q", "k", "v", "do"):
        return P("data", None, "model")
    if name in ("mask", "bias"):
        return P(*(axis if size > 1 else None for axis, size in zip(("data", "model"), x.shape, strict=False)))
    if name in ("score_args", "dropout_key"):
        return P()
    return P("model") if name == "sinks" else P("data", "model") if name == "dlse" else P("data")


@pytest.mark.parametrize(
    ("case", "mode", "implementation"),
    essentials(
        [(case, mode, "xla") for case in (APART, SHARED) for mode in MODES]
        + [(APART, "shardy", "interpret"), (SHARED, "explicit", "interpret")],
        [(APART, "shardy", "xla"), (SHARED, "explicit", "xla")].__contains__,
        several=True,
    ),
    ids=lambda value: {APART: "apart", SHARED: "shared"}.get(value, value) if isinstance(value, Case) else value,
)
def test_sharded_over_batch_and_heads(case, mode, implementation):
    arrays, naive, x64 = references(case)
    mesh = mesh_of(mode, 4, 2)
    place = lambda name, x: jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, spec_of(name, x))), x)
    static, given = {}, {}
    for name, x in case.options().items():
        (given if jax.tree.leaves(x) and all(isinstance(x, jax.Array) for x in jax.tree.leaves(x)) else static)[name] = x
    given = {name: place(name, x) for name, x in given.items()}
    parameters = {name: place(name, jax.tree.map(jnp.float32, x)) for name, x in case.parameters().items()}
    inputs = [place(name, jnp.float32(x)) for name, x in zip(("q", "k", "v", "do", "dlse"), arrays, strict=True)]

    def program(inputs, parameters, given):
        fn = functools.partial(
            attention, return_lse=True, implementation=implementation, block_sizes=SMALL_TILES, **static, **given
        )
        return accuracy.outputs(fn, *inputs, **parameters)

    run = compiled(program, mesh, inputs, parameters, given)
    got = run(inputs, parameters, given)
    assert collectives(run.as_text()) == ({"all-reduce"} if case is SHARED else set())
    for verdict in accuracy.verdicts(case, arrays, got, naive, x64):
        assert verdict.agrees, verdict
    for x, primal in zip((got.o, got.dq, got.dk, got.dv), (inputs[0], *inputs[:3]), strict=True):
        assert x.sharding.is_equivalent_to(primal.sharding, 4)
    assert got.lse.sharding.is_equivalent_to(NamedSharding(mesh, P("data", "model")), 3)
    for name, x in got.dscore.items():
        for gradient, primal in zip(jax.tree.leaves(x), jax.tree.leaves(parameters[name]), strict=True):
            assert gradient.sharding.is_equivalent_to(primal.sharding, primal.ndim)


@pytest.mark.parametrize("mode", essentials(MODES, ("shardy",).__contains__))
@pytest.mark.parametrize("kv_heads", essentials([1, 2], (2).__eq__))
def test_derivatives_move_nothing(mode, kv_heads):
    """Forward mode, and of a gradient's tangent what has to be summed alone."""
    q, k, do = normal(4, 20, 4, 8), normal(4, 20, kv_heads, 8, seed=1), normal(4, 20, 4, 8, seed=2)

    def along(q, k, do):
        fn = lambda q, k: attention(q, k, 2 * k, causal=True, return_lse=True, block_sizes=SMALL_TILES)
        return jax.jvp(fn, (q, k), (do, k))[1]

    def twice(q, k, do):
        gradient = lambda q, k: jax.vjp(lambda q, k: attention(q, k, 2 * k, causal=True, block_sizes=SMALL_TILES), q, k)[1](do)
        return jax.jvp(gradient, (q, k), (do, k))[1]

    mesh = mesh_of(mode, 4, 2)
    heads = "model" if kv_heads == 2 else None
    specs = P("data", None, "model"), P("data", None, heads), P("data", None, "model")
    arrays = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((q, k, do), specs, strict=True)]
    for fn in (along, twice):
        run = compiled(fn, mesh, *arrays)
        shared = fn is twice and kv_heads == 1
        assert collectives(run.as_text()) == ({"all-reduce"} if shared else set())
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=3e-5), run(*arrays), jax.jit(fn)(q, k, do))


# ------------------------------------------------------------------------------------------- grouped heads


def outputs(q, k, v, **options):
    fn = functools.partial(attention, causal=True, return_lse=True, block_sizes=SMALL_TILES, **options)
    return values_and_gradients(fn, q, k, v)


def values_and_gradients(fn, q, k, v):
    """What fn gives, and its gradients with cotangents that are sharded like its results."""
    (o, lse), pull = jax.vjp(fn, q, k, v)
    return accuracy.Outputs(o, lse, *pull((jnp.cos(o), jnp.ones_like(lse))))


def agree(got, expected):
    for (name, x), (_, y) in zip(got.items(), expected.items(), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5, err_msg=name)


@pytest.mark.whole
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("model", "kv_heads", "spec"), [(4, 2, P("data")), (8, 1, P()), (4, 4, P("data"))])
def test_kv_heads_that_are_whole_where_heads_are_sharded(mode, model, kv_heads, spec):
    """Each device reads its own kv head from the whole; only the gradient of that has to be summed."""
    q, k, v = normal(2, 40, 8, 8), normal(2, 40, kv_heads, 8, seed=1), normal(2, 40, kv_heads, 8, seed=2)
    expected = outputs(q, k, v, mask_fn=lambda b, h, i, j: (b + 2 * h + i + j) % 3 > 0, implementation="naive")
    mesh = mesh_of(mode, 8 // model, model)
    arguments = [jax.device_put(x, NamedSharding(mesh, s)) for x, s in ((q, P("data", None, "model")), (k, spec), (v, spec))]
    fn = functools.partial(outputs, mask_fn=lambda b, h, i, j: (b + 2 * h + i + j) % 3 > 0)
    run = compiled(fn, mesh, *arguments)
    agree(run(*arguments), expected)
    forward = compiled(lambda *qkv: attention(*qkv), mesh, *arguments)
    assert not collectives(forward.as_text())
    assert collectives(run.as_text()) <= {"all-reduce", "all-gather"}


@pytest.mark.whole
@pytest.mark.parametrize("mode", MODES)
def test_on_a_mesh_where_nothing_is_sharded(mode):
    q = normal(2, 20, 2, 8)
    run = compiled(outputs, mesh_of(mode, 4, 2), q, q, q)
    agree(run(q, q, q), outputs(q, q, q, implementation="naive"))
    assert not collectives(run.as_text())


# ------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["q", "k", "v", "mask"])
def test_a_sharded_sequence_raises(mode, name):
    mesh = mesh_of(mode, 4, 2)
    arrays = {
        "q": normal(2, 40, 2, 8),
        "k": normal(2, 40, 2, 8),
        "v": normal(2, 40, 2, 8),
        "mask": jnp.ones((2, 1, 40, 40), bool),
    }
    spec = P(None, None, "data") if name == "mask" else P(None, "data")
    arrays[name] = jax.device_put(arrays[name], NamedSharding(mesh, spec))
    error = ValueError if mode == "explicit" else RuntimeError  # XLA's own, with the text of ours
    with (
        pytest.raises(error, match=rf"{name} is sharded along its \w+_len of 40 .*'data'.* jflash.ring_attention"),
        jax.set_mesh(mesh),
    ):
        jax.jit(attention)(**arrays)


@pytest.mark.parametrize("mode", MODES)
def test_a_sharded_width_raises(mode):
    mesh = mesh_of(mode, 4, 2)
    v = jax.device_put(normal(2, 40, 2, 8), NamedSharding(mesh, P(None, None, None, "model")))
    error = ValueError if mode == "explicit" else RuntimeError
    with pytest.raises(error, match=r"v is sharded along its v_dim of 8 .*'model'.*: shard batch and heads, or gather it"):
        compiled(attention, mesh, normal(2, 40, 2, 8), normal(2, 40, 2, 8), v)


def test_heads_cut_across_groups_raise():
    cut = functools.partial(Cut.of, ("q", "k"), ("b i h d", "b j g d"), mesh={"x": 4})
    assert cut([((1, 9, 8, 4), P(None, None, "x")), ((1, 9, 2, 4), P())]).group_parts == 4
    with pytest.raises(ValueError, match=r"12 heads over 3 kv_heads are sharded into 4 parts .*'x'.* one group of 4 heads"):
        cut([((1, 9, 12, 4), P(None, None, "x")), ((1, 9, 3, 4), P())])


def test_in_explicit_mode_arguments_that_contradict_each_other_raise():
    mesh = mesh_of("explicit", 4, 2)
    q, k = (jax.device_put(normal(8, 20, 2, 8), NamedSharding(mesh, P(axis))) for axis in ("data", "model"))
    with pytest.raises(ValueError, match=r"k must be sharded along dimension 0 as .* \('data',\), got \('model',\)"):
        compiled(attention, mesh, q, k, k)


# ------------------------------------------------------------------------------------------- shard_map and vmap


@pytest.mark.whole
@pytest.mark.parametrize(("check_vma", "implementation"), [(True, "xla"), (False, "xla"), (False, "interpret")])
def test_inside_shard_map(check_vma, implementation):
    """Also where keys are the same on some devices: their gradient is summed over these, outside."""
    mesh = mesh_of("shardy", 4, 2)
    q, k, v = normal(4, 40, 2, 8), normal(4, 40, 1, 8, seed=1), normal(4, 40, 1, 8, seed=2)
    specs = P("data", None, "model"), P("data"), P("data")
    fn = functools.partial(attention, causal=True, return_lse=True, block_sizes=SMALL_TILES, implementation=implementation)
    out_specs = P("data", None, "model"), P("data", "model")
    sharded = jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=out_specs, check_vma=check_vma)
    arguments = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((q, k, v), specs, strict=True)]
    run = compiled(functools.partial(values_and_gradients, sharded), mesh, *arguments)
    agree(run(*arguments), outputs(q, k, v, implementation="naive"))
    assert collectives(run.as_text()) == {"all-reduce"}


def test_shard_map_over_a_part_of_the_mesh_raises():
    mesh = mesh_of("shardy", 4, 2)
    fn = jax.shard_map(attention, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
    with pytest.raises(
        ValueError, match=r"all axes of the mesh to be manual, got \('data',\) with \('model',\) left to the compiler"
    ):
        jax.jit(fn)(*(normal(4, 20, 2, 8),) * 3)


@pytest.mark.whole
@pytest.mark.parametrize("mode", MODES)
def test_vmap_over_a_sharded_axis(mode):
    mesh = mesh_of(mode, 4, 2)
    q, k = normal(4, 3, 30, 2, 8), normal(3, 30, 2, 8, seed=1)
    fn = lambda q, k, implementation=None: outputs(q, k, k, implementation=implementation, kv_lengths=jnp.array([30, 20, 9]))
    expected = jax.jit(jax.vmap(functools.partial(fn, implementation="naive"), in_axes=(0, None)))(q, k)
    arguments = jax.device_put(q, NamedSharding(mesh, P("data"))), jax.device_put(k, NamedSharding(mesh, P()))
    run = compiled(jax.vmap(fn, in_axes=(0, None)), mesh, *arguments)
    got = run(*arguments)
    agree(got, expected)
    assert not collectives(run.as_text())
    for x in got[:5]:
        assert x.sharding.is_equivalent_to(NamedSharding(mesh, P("data")), x.ndim)


# ------------------------------------------------------------------------------------------- GPUs that are not there


@pytest.mark.whole
@needs_compiler
@pytest.mark.parametrize("mode", ["shardy", "explicit"])
def test_on_eight_h100s_each_launches_its_own_part(mode):
    mesh = mesh_of(mode, 4, 2, machine_code.devices("h100", 8))
    aval = lambda heads: jax.ShapeDtypeStruct(
        (8, 1024, heads, 64), jnp.bfloat16, sharding=NamedSharding(mesh, P("data", None, "model"))
    )

    def forward_backward(q, k, v, do):
        o, pull = jax.vjp(lambda *qkv: attention(*qkv, causal=True), q, k, v)
        return o, pull(do)

    with compiling_quickly(False):
        program = machine_code.compile_for(forward_backward, aval(8), aval(4), aval(4), aval(8), gpu="h100", mesh=mesh)
    assert not collectives(program.text)
    assert {kernel.name: kernel.grid[1:] for kernel in program.kernels if kernel.name.startswith("jflash_")} == {
        "jflash_forward": (4, 2), "jflash_delta": (4, 2), "jflash_dkv": (2, 2), "jflash_dq": (4, 2)
    }  # fmt: skip
