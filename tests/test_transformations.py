"""JAX's transformations of attention(), each with values and gradients."""

import contextlib
import functools
import math
import re

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from checks import SMALL_TILES, TILED, essentials, needs_compiler, normal
from jax import export
from jax.sharding import Mesh

from jflash import attention, machine_code
from jflash.proof import accuracy
from jflash.proof.cases import SCORE_FNS

pytestmark = pytest.mark.usefixtures("quickly_compiled")

EVERYWHERE = pytest.mark.parametrize("implementation", TILED)
FOR_USERS = pytest.mark.parametrize("implementation", essentials(TILED, ("xla",).__contains__))


def inputs(*lead):
    """q, k, v and the cotangent of o, with some dimensions in front."""
    shapes = (2, 20, 4, 8), (2, 20, 2, 8), (2, 20, 2, 8), (2, 20, 4, 8)
    return tuple(normal(*lead, *shape, seed=seed) for seed, shape in enumerate(shapes))


def assert_close(got, expected, atol=1e-5):
    got, expected = jax.tree.leaves(got), jax.tree.leaves(expected)
    for x, y in zip(got, expected, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        np.testing.assert_allclose(x, y, atol=atol, rtol=1e-5)


def kernels(text: str) -> list[str]:
    """The kernels that a lowered program for a GPU launches: one name for each launch, of functions for each call."""
    bodies = dict(re.findall(r"^  func\.func \w+ @(\w+)\((.*?)^  }", text, re.S | re.M))

    def launches(body):
        called = (bodies[name] for name in re.findall(r"call @(\w+)\(", body))
        return re.findall(r'name = "(jflash_\w+)"', body) + [name for body in called for name in launches(body)]

    return sorted(launches(bodies["main"]))


FORWARD, BACKWARD = ["jflash_forward"], ["jflash_delta", "jflash_dkv", "jflash_dq"]
REACH = ["jflash_key_seen", "jflash_key_seen", "jflash_query_sees"]  # under a mask: the forward asks for the first

# ------------------------------------------------------------------------------------------------------- everything

FLOATS = ("bias", "sinks", "slopes")


def everything(*lead):
    """Arrays for every argument that takes one, by name, with some dimensions in front."""
    random = np.random.default_rng(0)
    return {
        **dict(zip(("q", "k", "v", "do"), inputs(*lead), strict=True)),
        "bias": normal(*lead, 4, 1, 20, seed=5),
        "sinks": normal(*lead, 4, seed=6),
        "slopes": normal(*lead, 4, seed=7),
        "mask": jnp.asarray(random.random((*lead, 2, 1, 20, 20)) < 0.8),
        "segment_ids": jnp.asarray(np.sort(random.integers(0, 3, (*lead, 2, 20)))),
        "kv_lengths": jnp.asarray(random.integers(5, 21, (*lead, 2))),
        "q_offset": jnp.asarray(random.integers(-3, 9, (*lead, 2))),
        "dropout_key": jax.random.split(jax.random.key(0), lead) if lead else jax.random.key(0),
    }


def call(arguments, implementation=None):
    """o, lse, and the gradients by every float among `arguments`: some of everything(); small tiles."""
    q, k, v, do = (arguments[name] for name in ("q", "k", "v", "do"))
    floats = {name: arguments[name] for name in FLOATS if name in arguments}
    options = {name: x for name, x in arguments.items() if name not in ("q", "k", "v", "do", *FLOATS)}
    options["causal"] = "q_offset" in options
    options["dropout_rate"] = 0.3 if "dropout_key" in options else 0.0

    def fn(q, k, v, slopes=None, **floats):
        if slopes is not None:
            floats |= {"score_fn": SCORE_FNS["alibi"], "score_args": (slopes,)}
        return attention(q, k, v, **floats, **options, return_lse=True, block_sizes=SMALL_TILES, implementation=implementation)

    return accuracy.outputs(fn, q, k, v, do, jnp.ones((2, 4, 20), jnp.float32), **floats)


@functools.cache
def one(implementation):
    return jax.jit(functools.partial(call, implementation=implementation))


# ------------------------------------------------------------------------------------------------------------- vmap

NESTED = {
    # what is given: its mapped axes, the outer one first; None is not mapped
    "q": "01", "k": "1", "v": "0", "do": "01", "bias": "1", "mask": "0", "sinks": "", "kv_lengths": "01",
}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "mapped", "implementation"),
    essentials(
        [
            ("", "q do", "xla"),
            ("", "k v", "interpret"),
            ("bias", "bias", "xla"),
            ("bias", "q k do", "interpret"),
            ("sinks slopes", "sinks slopes", "xla"),
            ("mask segment_ids", "mask", "interpret"),
            ("kv_lengths q_offset", "q_offset", "xla"),
            ("dropout_key", "dropout_key", "xla"),
            ("everything", "everything", "xla"),
            ("everything", "everything", "interpret"),
        ],
        [("everything", "everything", "xla"), ("", "k v", "interpret")].__contains__,
        several=True,
    ),
)
def test_vmap_over_any_arguments_is_a_loop(options, mapped, implementation):
    batched = everything(2)
    if options != "everything":
        batched = {name: batched[name] for name in ("q", "k", "v", "do", *options.split())}
    axes = {name: 0 if mapped == "everything" or name in mapped.split() else None for name in batched}
    arguments = {name: x if axes[name] == 0 else x[0] for name, x in batched.items()}
    got = jax.jit(jax.vmap(functools.partial(call, implementation=implementation), (axes,)))(arguments)
    for n in range(2):
        each = {name: x[n] if axes[name] == 0 else x for name, x in arguments.items()}
        assert_close(jax.tree.map(lambda x, n=n: x[n], got), one(implementation)(each), atol=2e-5)


@pytest.mark.whole
@EVERYWHERE
def test_nested_vmap_is_two_loops(implementation):
    """Arrays of rank 6: over both dimensions in front, over one or the other, and over neither."""
    batched = everything(2, 3)
    cut = {"01": lambda x: x, "0": lambda x: x[:, 0], "1": lambda x: x[0], "": lambda x: x[0, 0]}
    arguments = {name: cut[axes](batched[name]) for name, axes in NESTED.items()}
    inner, outer = ({name: 0 if axis in axes else None for name, axes in NESTED.items()} for axis in "10")
    got = jax.jit(jax.vmap(jax.vmap(functools.partial(call, implementation=implementation), (inner,)), (outer,)))(arguments)
    for place in np.ndindex(2, 3):
        each = {name: x[tuple(place[int(axis)] for axis in NESTED[name])] for name, x in arguments.items()}
        assert_close(jax.tree.map(lambda x, place=place: x[place], got), one(implementation)(each), atol=2e-5)


def test_vmap_over_axes_that_are_not_the_first():
    q, k, v, do = inputs(3)

    def outputs(q, k, v, do):
        o, pull = jax.vjp(functools.partial(attention, causal=True), q, k, v)
        return o, pull(do)

    expected = jax.jit(jax.vmap(outputs))(q, k, v, do)
    moved = [jnp.moveaxis(x, 0, axis) for x, axis in zip((q, k, v, do), (1, 3, -1, 2), strict=True)]
    got = jax.jit(jax.vmap(outputs, in_axes=(1, 3, -1, 2), out_axes=2))(*moved)
    assert_close(jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), got), expected)


@pytest.mark.whole
@needs_compiler
def test_vmap_makes_one_kernel_larger_and_not_more_of_them():
    """For a GPU: nested, with every argument mapped, forward and backward; the grid of a launch has at most 3 dimensions."""
    raw = {**everything(2, 3), "dropout_key": jnp.zeros((2, 3, 2), jnp.uint32)}
    avals = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), raw)
    lowered = machine_code.lower_for(jax.vmap(jax.vmap(call)), avals, gpu="h100")
    assert kernels(lowered.as_text()) == sorted([*FORWARD, *BACKWARD, *REACH, "jflash_dargs", "jflash_dbias"])

    plain = lambda q, k, v, do: jax.vjp(attention, q, k, v)[1](do)
    programs = [
        machine_code.compile_for(fn, *(jax.ShapeDtypeStruct((*lead, 2, 128, 2, 16), jnp.bfloat16) for _ in "qkvo"), gpu="h100")
        for fn, lead in ((plain, ()), (jax.vmap(jax.vmap(plain)), (2, 3)))
    ]
    for name in (*FORWARD, *BACKWARD):
        alone, mapped = (math.prod(program[name].grid) for program in programs)
        assert mapped == 6 * alone


# ---------------------------------------------------------------------------------------------- jit and derivatives


@EVERYWHERE
def test_jit_and_each_way_to_ask_for_gradients(implementation):
    assert_close(one(implementation)(everything()), one("naive")(everything()), atol=2e-5)
    q, k, v, do = inputs()
    fn = functools.partial(attention, causal=True, implementation=implementation, block_sizes=SMALL_TILES)
    loss = lambda q, k, v: jnp.vdot(fn(q, k, v), do)
    o, pull = jax.vjp(fn, q, k, v)
    expected, gradients = functools.partial(attention, causal=True, implementation="naive")(q, k, v), pull(do)
    assert_close(o, expected)
    assert_close(jax.grad(loss, (0, 1, 2))(q, k, v), gradients)
    assert_close(jax.jit(jax.value_and_grad(loss, argnums=2))(q, k, v), (jnp.vdot(expected, do), gradients[2]), atol=1e-4)
    one_by_one = jax.vmap(lambda i: pull(jnp.zeros_like(do).at[0, i].set(do[0, i])))(jnp.arange(20))  # vmap of a pull-back
    assert_close(jax.tree.map(lambda x: x[:, 0].sum(0), one_by_one), jax.tree.map(lambda x: x[0], gradients))


# ------------------------------------------------------------------------------------------------------- checkpoint

BOTH_NAMES = ("jflash_o", "jflash_lse")
# name: (policy, how often the forward kernel runs)
POLICIES = {
    "o and lse": (jax.checkpoint_policies.save_only_these_names(*BOTH_NAMES), 1),
    "everything": (jax.checkpoint_policies.everything_saveable, 1),
    "o": (jax.checkpoint_policies.save_only_these_names("jflash_o"), 2),
    "lse": (jax.checkpoint_policies.save_only_these_names("jflash_lse"), 2),
    "nothing": (jax.checkpoint_policies.nothing_saveable, 2),
    "none given": (None, 2),
    "products": (jax.checkpoint_policies.dots_saveable, 2),
}


def layer(x, implementation=None):
    """One that begins and ends with something, so that its attention is neither its input nor its output."""
    return jnp.sum(jnp.sin(attention(jnp.sin(x), x, x, causal=True, implementation=implementation)))


@needs_compiler
@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_that_keeps_o_and_lse_runs_the_forward_once(policy):
    policy, forwards = POLICIES[policy]
    x = jax.ShapeDtypeStruct((2, 128, 2, 16), jnp.bfloat16)
    gradient = jax.value_and_grad(jax.checkpoint(layer, policy=policy))
    lowered = machine_code.lower_for(gradient, x, gpu="h100")
    assert kernels(lowered.as_text()) == sorted(forwards * FORWARD + BACKWARD)


@needs_compiler
def test_the_compiler_does_not_undo_a_policy():
    x = jax.ShapeDtypeStruct((2, 128, 2, 16), jnp.bfloat16)
    gradient = jax.value_and_grad(jax.checkpoint(layer))
    text = machine_code.compile_for(gradient, x, gpu="h100").text
    calls = [line for line in text.splitlines() if "custom-call(" in line and "triton" in line]
    assert sum("jflash_forward" in line for line in calls) == 2
    assert len(calls) == 5


@pytest.mark.whole
@EVERYWHERE
def test_policies_change_no_gradient(implementation):
    q = inputs()[0]
    run = functools.partial(layer, implementation=implementation)
    expected = jax.jit(jax.grad(run))(q)
    for policy in ("o and lse", "o", "nothing"):
        assert_close(jax.jit(jax.grad(jax.checkpoint(run, policy=POLICIES[policy][0])))(q), expected)


# ------------------------------------------------------------------------------------------------- scan and donation


@FOR_USERS
def test_scan_over_layers_is_a_loop(implementation):
    x, weights = normal(2, 20, 2, 8), normal(3, 3, 8, 8, seed=1) / 3  # [layers, (q, k, v), 8, 8]

    def block(x, w):
        q, k, v = (x @ part for part in w)
        return x + attention(q, k, v, causal=True, implementation=implementation, block_sizes=SMALL_TILES), None

    def loop(x, weights):
        for w in weights:
            x, _ = block(x, w)
        return jnp.sum(jnp.sin(x))

    def scanned(x, weights, block=block):
        return jnp.sum(jnp.sin(jax.lax.scan(block, x, weights)[0]))

    expected = jax.jit(jax.value_and_grad(loop, (0, 1)))(x, weights)
    kept = functools.partial(scanned, block=jax.checkpoint(block, policy=POLICIES["o and lse"][0]))
    for fn in (scanned, kept):
        assert_close(jax.jit(jax.value_and_grad(fn, (0, 1)))(x, weights), expected, atol=1e-4)


@EVERYWHERE
def test_donated_buffers(implementation):
    step = lambda q, k, v, do: jax.vjp(functools.partial(attention, implementation=implementation), q, k, v)[1](do)
    expected = jax.jit(step)(*inputs())
    q, k, v, do = inputs()
    assert_close(jax.jit(step, donate_argnums=(0, 1, 2))(q, k, v, do), expected)
    assert all(x.is_deleted() for x in (q, k, v))


# ------------------------------------------------------------------------------------------------------ 64-bit mode


@FOR_USERS
def test_in_64_bit_mode_float32_is_float32(implementation):
    arguments = everything()
    expected = jax.tree.map(np.asarray, one(implementation)(arguments))
    with jax.enable_x64(True):
        wide = {name: x.astype(jnp.int64) if name in ("kv_lengths", "q_offset") else x for name, x in arguments.items()}
        got = jax.jit(functools.partial(call, implementation=implementation))(wide)
        assert_close(jax.tree.map(np.asarray, got), expected)


@pytest.mark.whole
@EVERYWHERE
@pytest.mark.parametrize("options", [{}, {"causal": True, "q_offset": 3}, {"window": (3, 2)}, {"softcap": 2.0}], ids=str)
def test_in_64_bit_mode_with_numbers_of_python(implementation, options):
    fn = functools.partial(attention, implementation=implementation, block_sizes=SMALL_TILES, **options)
    gradients = lambda q, k, v, do: jax.vjp(fn, q, k, v)[1](do)
    expected = jax.tree.map(np.asarray, jax.jit(gradients)(*inputs()))
    with jax.enable_x64(True):
        assert_close(jax.tree.map(np.asarray, jax.jit(gradients)(*inputs())), expected)


@needs_compiler
def test_in_64_bit_mode_the_kernels_are_the_same():
    raw = {**everything(), "dropout_key": jnp.zeros(2, jnp.uint32)}
    avals = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), raw)
    with jax.enable_x64(True):
        lowered = machine_code.lower_for(call, avals, gpu="h100")
    assert kernels(lowered.as_text()) == sorted([*FORWARD, *BACKWARD, *REACH, "jflash_dargs", "jflash_dbias"])


# ----------------------------------------------------------------------------------------------------------- export

# Serialized Triton code is as stable as XLA's and no more: JAX wants to hear that one knows.
TRITON = export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")


def exported(fn, *avals, platform, vjp_order=0):
    """What comes back from the bytes of fn for one platform; a GPU needs not be there."""
    pytest.importorskip("flatbuffers")
    mesh = contextlib.nullcontext() if platform == "cpu" else jax.set_mesh(Mesh(machine_code.devices("h100"), ("device",)))
    with mesh:
        program = export.export(jax.jit(fn), platforms=[platform], disabled_checks=[TRITON])(*avals)
        return export.deserialize(program.serialize(vjp_order=vjp_order))


def with_batch(batch):
    """Avals of q, k, v, the lengths of the keys and a bias."""
    of = lambda *shape, dtype=jnp.float32: jax.ShapeDtypeStruct((batch, *shape), dtype)
    return of(20, 4, 8), of(20, 2, 8), of(20, 2, 8), of(dtype=jnp.int32), of(4, 1, 20)


def padded(q, k, v, lengths, bias, implementation=None):
    return attention(q, k, v, kv_lengths=lengths, bias=bias, causal=True, implementation=implementation)


@pytest.mark.whole
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_exported_for_a_cpu_with_an_open_batch(implementation):
    fn = functools.partial(padded, implementation=implementation)
    program = exported(fn, *with_batch(*export.symbolic_shape("b")), platform="cpu", vjp_order=1)
    for batch in (1, 3):
        arguments = *(x[0] for x in inputs(1)[:3]), jnp.array([13, 20]), normal(2, 4, 1, 20)
        arguments = [jnp.concatenate([x] * batch) for x in arguments]
        (got, pull), (expected, expected_pull) = jax.vjp(program.call, *arguments), jax.vjp(fn, *arguments)
        assert_close(got, expected)
        for x, y in zip(pull(got), expected_pull(got), strict=True):
            if x.dtype != jax.dtypes.float0:
                np.testing.assert_allclose(x, y, atol=1e-5)


@EVERYWHERE
def test_exported_for_a_cpu(implementation):
    fn = functools.partial(padded, implementation=implementation)
    arguments = *inputs()[:3], jnp.array([13, 20]), normal(2, 4, 1, 20)
    assert_close(exported(fn, *with_batch(2), platform="cpu").call(*arguments), fn(*arguments))


@needs_compiler
def test_exported_for_a_gpu_that_is_not_there():
    gradients = jax.grad(lambda *arguments: jnp.sum(padded(*arguments)), (0, 1, 2, 4))
    program = exported(gradients, *with_batch(2), platform="cuda")
    assert program.platforms == ("cuda",)
    assert kernels(program.mlir_module()) == sorted([*FORWARD, *BACKWARD, "jflash_dbias"])
    with pytest.raises(ValueError, match="cuda"):
        program.call(*inputs()[:3], jnp.array([13, 20]), normal(2, 4, 1, 20))


@needs_compiler
def test_an_open_batch_says_no_on_a_gpu():
    """The grid of a Triton kernel is part of its program."""
    with pytest.raises((NotImplementedError, ValueError), match=r"grid|batch"):
        exported(padded, *with_batch(*export.symbolic_shape("b")), platform="cuda")


@pytest.mark.parametrize("shape", ["2,n,2,8", "2,20,2,d"])
def test_lengths_and_widths_that_are_open_say_no(shape):
    q = jax.ShapeDtypeStruct(export.symbolic_shape(shape), jnp.float32)
    with pytest.raises(ValueError, match=r"q must have a known length and width \(jax.export: .*\), got \(2, .*\)"):
        export.export(jax.jit(attention), platforms=["cpu"])(q, q, q)


# ---------------------------------------------------------------------------------------------- tracing, and no NaN


@EVERYWHERE
def test_traced_without_running(implementation):
    arguments, fn = everything(), functools.partial(call, implementation=implementation)
    expected = one(implementation)(arguments)
    facts = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    assert facts(jax.eval_shape(fn, arguments)) == facts(expected)
    jaxpr = jax.make_jaxpr(one(implementation))(arguments)
    assert_close(jax.extend.core.jaxpr_as_fun(jaxpr)(*jax.tree.leaves(arguments)), expected)


@pytest.mark.parametrize(
    "implementation",
    [
        None,
        "xla",
        pytest.param(
            "interpret", marks=pytest.mark.xfail(strict=True, reason="JAX evaluates no Pallas kernel in this context")
        ),
    ],
)
def test_computed_while_tracing(implementation):
    q, k, v, _ = inputs()
    fn = functools.partial(attention, causal=True, implementation=implementation)

    @jax.jit
    def program(x):
        with jax.ensure_compile_time_eval():
            o = fn(q, k, v)
            assert not isinstance(o, jax.core.Tracer)
        return x + o

    np.testing.assert_allclose(program(1.0), 1.0 + fn(q, k, v), atol=1e-6)


@FOR_USERS
def test_debug_nans_finds_none_but_those_that_are_there(implementation):
    arguments = everything()
    arguments["bias"] = arguments["bias"].at[:, :, 7].set(-jnp.inf)
    arguments["sinks"] = jnp.full(4, -jnp.inf)  # so that rows see nothing at all
    arguments["mask"] = arguments["mask"].at[:, :, 3:5].set(False)
    arguments["kv_lengths"] = jnp.array([0, 20])
    program = jax.jit(functools.partial(call, implementation=implementation))
    with jax.debug_nans(True):
        got = program(arguments)
        assert not np.asarray(got.o[0]).any()
        with pytest.raises(FloatingPointError, match="nan"):
            program({**arguments, "v": arguments["v"].at[1, 0].set(jnp.nan)})
