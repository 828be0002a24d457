"""What the compiler makes of the kernels, for GPUs that are not there."""

from __future__ import annotations

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from checks import essentials, needs_compiler
from jax.interpreters import mlir
from jax.sharding import SingleDeviceSharding
from jaxlib.mlir import ir
from jaxlib.triton import dialect as triton

import jflash
from jflash import machine_code
from jflash.launch import blocks
from jflash.machine_code import GPUS, compiler, loops, pipeline
from jflash.machine_code.kernel import Assembled, serialized
from jflash.proof.cases import SCORE_FNS

REACH = ("jflash_key_seen", "jflash_query_sees")  # where more is hidden than bounds tell
KERNELS = ("jflash_forward", "jflash_delta", "jflash_dkv", "jflash_dq")
APART = ("jflash_forward", "jflash_delta", "jflash_dk", "jflash_dv", "jflash_dq")  # where head_dim is large
# Where ptxas cannot place the registers of a loop, it settles for 32 of them and spills 9000 bytes and more. Tables are made
# with the newest JAX, whose compiler spills nothing; an older one may spill a little.
MOST_SPILLED_BY_ANOTHER_COMPILER = 2048
NEWEST = jax.__version_info__ >= (0, 12)


def attention(causal: bool = False):
    """Attention and its gradient, as a function of q, k, v and do."""

    def forward_backward(q, k, v, do):
        o, backward = jax.vjp(lambda q, k, v: jflash.attention(q, k, v, causal=causal), q, k, v)
        return o, *backward(do)

    return forward_backward


def avals(batch, length, heads, head_dim, dtype=jnp.float16, kv_heads=None, sharding=None):
    """q, k, v and do."""
    of = lambda heads: jax.ShapeDtypeStruct((batch, length, heads, head_dim), dtype, sharding=sharding)
    return of(heads), of(kv_heads or heads), of(kv_heads or heads), of(heads)


# ------------------------------------------------------------------------------------------------------ the defaults

# Of 16 bits, and of 32. What else is in the tables is compiled in test_tuning.py, other GPUs among it.
WIDTHS_WITHOUT_SPILLS = {
    "h100": ((32, 64, 80, 96, 128, 160, 192, 256), (64, 128, 256)),
    "a100": ((32, 64, 80, 96, 128), (32, 64, 128)),
}


# Issue slots of the hot loop for each cycle of the tensor cores, on H100 in bfloat16.
BUSY = {
    64: {"forward": 1.06, "dkv": 0.67, "dq": 0.58},
    128: {"forward": 0.56, "dkv": 0.42, "dq": 0.43},
    256: {"forward": 0.48, "dk": 0.52, "dv": 0.28, "dq": 0.30},
}

WIDTHS_OF_16_BITS = sorted({entry.key.head_dim for entry in blocks.shipped("hopper") if entry.key.bits == 16})


def defaults():
    for gpu, of_bits in WIDTHS_WITHOUT_SPILLS.items():
        for dtype, widths in zip((jnp.bfloat16, jnp.float32), of_bits, strict=True):
            for head_dim in widths:
                essential = gpu == "h100" and dtype == jnp.bfloat16 and head_dim == 64
                marks = () if essential else [pytest.mark.whole]
                yield pytest.param(gpu, dtype, head_dim, id=f"{gpu} {dtype.__name__} {head_dim}", marks=marks)


@functools.cache
def compiled(gpu, dtype, head_dim, *, causal):
    """Attention and its gradient as they are by default; causal with what makes kernels larger: grouped heads."""
    return machine_code.compile_for(attention(causal), *avals(2, 4096, 4, head_dim, dtype, 2 if causal else 4), gpu=gpu)


@needs_compiler
@pytest.mark.parametrize(("gpu", "dtype", "head_dim"), list(defaults()))
def test_defaults_do_not_spill_and_use_the_tensor_cores(gpu, dtype, head_dim):
    program = compiled(gpu, dtype, head_dim, causal=True)
    apart = gpu == "h100" and head_dim > 160 and dtype == jnp.bfloat16
    own = [kernel for kernel in program.kernels if kernel.name.startswith("jflash_")]
    assert {kernel.name for kernel in own} == set(APART if apart else KERNELS)
    for kernel in own:
        assert kernel.spill_bytes <= (0 if NEWEST else MOST_SPILLED_BY_ANOTHER_COMPILER), kernel
        if kernel.shared_bytes is not None:  # where XLA does not tell, it has still refused what does not fit
            assert kernel.shared_bytes <= kernel.target.shared_per_block
        if kernel.name != "jflash_delta":
            assert kernel.tensor_cores
            assert kernel.tensor_cores == "HMMA" or gpu == "h100"
            assert kernel.tensor_cores == "HGMMA" or gpu == "a100" or dtype == jnp.float32


@needs_compiler
@pytest.mark.parametrize("head_dim", essentials(BUSY, (64, 256).__contains__))
def test_hot_loops_leave_the_tensor_cores_busy_on_h100(head_dim):
    program = compiled("h100", jnp.bfloat16, head_dim, causal=False)
    for name, most in BUSY[head_dim].items():
        kernel = program[f"jflash_{name}"]
        assert kernel.issue_per_tensor <= most
        assert kernel.spill_bytes <= (0 if NEWEST else MOST_SPILLED_BY_ANOTHER_COMPILER)


@functools.cache
def compiled_with_bias(head_dim, causal):
    def forward_backward(q, k, v, do, bias):
        return jax.vjp(lambda q, k, v: jflash.attention(q, k, v, bias=bias, causal=causal), q, k, v)[1](do)

    bias = jax.ShapeDtypeStruct((1, 4, 4096, 4096), jnp.bfloat16)
    return machine_code.compile_for(forward_backward, *avals(2, 4096, 4, head_dim, jnp.bfloat16, 2), bias, gpu="h100")


@needs_compiler
@pytest.mark.parametrize("options", ["plain", "general"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", essentials(WIDTHS_OF_16_BITS, (64,).__contains__))
def test_no_default_waits_for_each_product_on_h100(head_dim, causal, options):
    """Products that ptxas serialises cost no instruction more, and are slower: BUSY does not see them."""
    plain = options == "plain"
    program = compiled("h100", jnp.bfloat16, head_dim, causal=causal) if plain else compiled_with_bias(head_dim, causal)
    own = [kernel for kernel in program.kernels if re.fullmatch("jflash_(forward|dkv|dk|dv|dq)", kernel.name)]
    assert len(own) >= 3
    for kernel in own:
        assert not kernel.serialized, kernel
        assert all(loop.waits < loop.opcodes["HGMMA"] for loop in kernel.busy), kernel


@pytest.mark.whole
@needs_compiler
def test_a_head_dim_of_96_costs_three_quarters_of_128():
    """Two chunks, 64 and 32, in place of a tile padded to 128."""
    cycles = lambda head_dim: max(
        loop.cycles["tensor"] for loop in compiled("h100", jnp.bfloat16, head_dim, causal=True)["jflash_forward"].busy
    )
    assert 0 < cycles(96) <= 0.77 * cycles(128)


# ------------------------------------------------------------------------------------------------------- options

LENGTH, HEADS = 1024, 4
OPTIONS = {
    # name: (arrays by name, other options)
    "segments": ({"segment_ids": ((2, LENGTH), jnp.int32)}, {"causal": True}),
    "lengths": ({"q_lengths": ((2,), jnp.int32), "kv_lengths": ((2,), jnp.int32)}, {}),
    "mask": ({"mask": ((2, 1, LENGTH, LENGTH), bool)}, {}),
    "padding mask": ({"mask": ((2, 1, 1, LENGTH), bool)}, {}),
    "mask_fn": ({}, {"mask_fn": lambda b, h, i, j: (i + j + h + b) % 3 != 0}),
    "bias": ({"bias": ((1, HEADS, LENGTH, LENGTH), jnp.bfloat16)}, {}),
    "padding bias": ({"bias": ((2, 1, 1, LENGTH), jnp.float32)}, {}),
    "softcap": ({}, {"softcap": 50.0}),
    "sinks": ({"sinks": ((HEADS,), jnp.float32)}, {}),
    "dropout": ({"dropout_key": ((2,), jnp.uint32)}, {"dropout_rate": 0.1}),
    "alibi": ({"score_args": ((HEADS,), jnp.float32)}, {"score_fn": SCORE_FNS["alibi"]}),
    "t5": ({"score_args": ((HEADS, 32), jnp.float32)}, {"score_fn": SCORE_FNS["t5"]}),
    # What models combine.
    "packed": ({"segment_ids": ((2, LENGTH), jnp.int32)}, {"causal": True, "window": (512, 0)}),
    "structure prediction": ({"bias": ((1, HEADS, LENGTH, LENGTH), jnp.float32), "mask": ((2, 1, 1, LENGTH), bool)}, {}),
    "capped": ({"sinks": ((HEADS,), jnp.float32)}, {"causal": True, "window": (512, 0), "softcap": 50.0}),
}
WIDTHS = {"packed": (128, jnp.bfloat16), "structure prediction": (32, jnp.float32)}  # of the others: 64, bfloat16


def with_options(name: str):
    """(a function of q, k, v, do and the option's arrays, their shapes): attention and all its gradients."""
    shapes, options = OPTIONS[name]
    arrays = {name: jax.ShapeDtypeStruct(*shape) for name, shape in shapes.items()}

    def forward_backward(q, k, v, do, arrays):
        wrap = lambda name, x: (x,) if name == "score_args" else x
        differentiable = {name: wrap(name, x) for name, x in arrays.items() if name in ("bias", "sinks", "score_args")}
        rest = {name: x for name, x in arrays.items() if name not in differentiable}
        fn = lambda q, k, v, differentiable: jflash.attention(q, k, v, **differentiable, **rest, **options)
        o, backward = jax.vjp(fn, q, k, v, differentiable)
        return o, backward(do)

    head_dim, dtype = WIDTHS.get(name, (64, jnp.bfloat16))
    return forward_backward, (*avals(2, LENGTH, HEADS, head_dim, dtype, kv_heads=2), arrays)


@pytest.mark.whole
@needs_compiler
@pytest.mark.parametrize("gpu", ["a100", "h100"])
@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_compiles_and_does_not_spill(name, gpu):
    fn, arguments = with_options(name)
    program = machine_code.compile_for(fn, *arguments, gpu=gpu)
    own = [kernel for kernel in program.kernels if kernel.name.startswith("jflash_")]
    names = {kernel.name.split("__")[0] for kernel in own}  # one that is launched twice has a number behind its name
    arrays, static = OPTIONS[name]
    of_arrays = {"bias": "jflash_dbias", "score_args": "jflash_dargs"}
    hidden = {"mask", "segment_ids", "mask_fn"} & {*arrays, *static}
    assert names == {*KERNELS, *(REACH if hidden else ()), *(of_arrays[x] for x in arrays if x in of_arrays)}
    for kernel in own:
        assert kernel.spill_bytes <= 256, kernel
        assert kernel.tensor_cores or kernel.name.split("__")[0] in ("jflash_delta", *REACH)
    assert_nothing_beside_the_kernels(program, arguments[:4])


def assert_nothing_beside_the_kernels(program, matrices):
    """The host waits for nothing, and what is not a kernel does not touch q, k, v, o, do or their gradients."""
    assert not re.search(r"= \S+ (conditional|while)\(", program.text)
    entry = re.search(r"^ENTRY .*?^}", program.text, re.MULTILINE | re.DOTALL)
    assert entry
    found = re.findall(r"^ +(?:ROOT )?(%\S+) = (\S+) ([\w-]+)\((.*)$", entry[0], re.MULTILINE)
    shapes = {name: shape for name, shape, *_ in found}
    matrix = {",".join(map(str, x.shape)) for x in matrices}
    assert any(re.match(r"\w+\[(.*?)\]", shape)[1] in matrix for name, shape, *_ in found if shape[0] != "(")
    for name, _, operation, rest in found:
        if operation in ("parameter", "custom-call", "tuple", "get-tuple-element", "bitcast"):
            continue
        for touched in [name, *re.findall(r"%[\w.-]+", rest.split(", calls=")[0])]:
            dimensions = re.match(r"\w+\[(.*?)\]", shapes.get(touched, ""))
            assert not (dimensions and dimensions[1] in matrix), f"{operation} {name} touches {touched} {shapes[touched]}"


@needs_compiler
@pytest.mark.parametrize(
    ("argnums", "kernels"), [((0,), {"jflash_dq"}), ((1,), {"jflash_dkv"}), ((0, 3), {"jflash_dq", "jflash_dbias"})]
)
def test_gradients_that_nobody_asks_for_are_not_computed(argnums, kernels):
    q, k, v, _ = avals(2, 1024, 4, 64, jnp.bfloat16)
    bias = jax.ShapeDtypeStruct((1, 4, 1, 1024), jnp.float32)
    loss = lambda q, k, v, bias: jflash.attention(q, k, v, bias=bias).astype(jnp.float32).sum()
    program = machine_code.compile_for(jax.grad(loss, argnums), q, k, v, bias, gpu="h100")
    own = {kernel.name for kernel in program.kernels if kernel.name.startswith("jflash_")}
    assert own == {"jflash_forward", "jflash_delta", *kernels}


@pytest.mark.whole
@needs_compiler
def test_options_that_are_not_used_cost_nothing():
    """The figures of the kernels before there were options: a change here is one to every call."""
    program = machine_code.compile_for(attention(causal=True), *avals(2, 4096, 4, 64), gpu="h100")
    for name, most in {"jflash_forward": 1.06, "jflash_dkv": 0.67, "jflash_dq": 0.58}.items():
        assert program[name].issue_per_tensor <= most
        assert not program[name].serialized
        # The compiler of JAX 0.10 spilled 32 bytes of the forward then too.
        assert program[name].spill_bytes <= (32 if jax.__version_info__ < (0, 11) and name == "jflash_forward" else 0)


@pytest.mark.whole
@needs_compiler
def test_what_dropout_costs_an_element():
    """At most 13 instructions: one block of Philox serves four pairs, which the compiler must find out by itself."""
    issued = {}
    for name in ("dropout", "sinks"):  # a sink costs nothing in the loop
        fn, arguments = with_options(name)
        launch = jflash.BlockSizes(block_q=128, block_kv=64, num_warps=4, num_stages=2)
        fn = functools.partial(jflash.attention, **OPTIONS[name][1], block_sizes=launch)
        call = lambda q, k, v, arrays, fn=fn: fn(q, k, v, **arrays)
        program = machine_code.compile_for(call, *arguments[:3], arguments[4], gpu="h100")
        issued[name] = max(loop.cycles["issue"] for loop in program["jflash_forward"].loops)
    assert issued["dropout"] - issued["sinks"] <= 13 * 128 * 64 / (4 * 32)


# --------------------------------------------------------------------------------------------- lowering and memory


@needs_compiler
def test_kernels_are_in_the_program_for_a_gpu_and_not_in_the_one_for_a_cpu():
    f, arguments = attention(), avals(2, 1024, 4, 64)
    assert sorted(kernels(machine_code.lower_for(f, *arguments, gpu="h100"))) == sorted(KERNELS)
    assert not kernels(jax.jit(f).trace(*arguments).lower(lowering_platforms=("cpu",)))


@pytest.mark.whole
@needs_compiler
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("platform", ["cpu", "h100"])
def test_memory_grows_linearly_with_the_length(platform, causal):
    def temp_bytes(length):
        if platform != "cpu":
            return machine_code.compile_for(attention(causal), *avals(1, length, 4, 64), gpu=platform).temp_bytes
        arguments = avals(1, length, 4, 64, sharding=SingleDeviceSharding(jax.devices("cpu")[0]))
        memory = jax.jit(attention(causal)).lower(*arguments).compile().memory_analysis()
        assert memory
        return memory.temp_size_in_bytes

    assert 0 < temp_bytes(8192) < 4.5 * temp_bytes(2048)


@pytest.mark.whole
@needs_compiler
@pytest.mark.parametrize("segments", [False, True], ids=["", "segments"])
def test_memory_of_everything_at_once_grows_linearly(segments):
    """But for lists of tiles of 64 x 64, where segments leave any of them: 8 bytes a tile, two lists at a time."""

    def temp_bytes(length):
        q, k, v, do = avals(1, length, 4, 64, jnp.bfloat16)
        ids, sinks = jax.ShapeDtypeStruct((1, length), jnp.int32), jax.ShapeDtypeStruct((4,), jnp.float32)
        options = {"causal": True, "window": (500, 0), "softcap": 30.0, "dropout_rate": 0.1, "dropout_key": jax.random.key(0)}

        def forward_backward(q, k, v, do, sinks, ids):
            more = options | ({"segment_ids": ids} if segments else {})
            fn = lambda q, k, v, sinks: jflash.attention(q, k, v, sinks=sinks, **more)
            return jax.vjp(fn, q, k, v, sinks)[1](do)

        return machine_code.compile_for(forward_backward, q, k, v, do, sinks, ids, gpu="h100").temp_bytes

    lists = 2 * 8 * (8192 // 64) ** 2 if segments else 0
    assert 0 < temp_bytes(8192) < 4.1 * temp_bytes(2048) + lists


@pytest.mark.whole
@needs_compiler
@pytest.mark.parametrize("shape", [(1, 1, 1, 4096), (1, 8, 1, 4096), (1, 1, 4096, 1), (1, 1, 4096, 4096)])
def test_the_gradient_of_a_bias_takes_no_more_than_the_bias(shape):
    q, k, v, do = avals(2, 4096, 8, 64, jnp.bfloat16)
    backward = lambda q, k, v, do, bias: jax.vjp(lambda q, bias: jflash.attention(q, k, v, bias=bias), q, bias)[1](do)
    program = machine_code.compile_for(backward, q, k, v, do, jax.ShapeDtypeStruct(shape, jnp.float32), gpu="h100")
    assert program["jflash_dbias"].tensor_cores
    assert program.temp_bytes < 2 * 8 * 4096 * 64 * 16  # a few arrays like q; one of all pairs would be 16 times that


@pytest.mark.whole
@needs_compiler
@pytest.mark.parametrize(
    ("q_shape", "bias_shape"),
    [
        ((4096, 49, 3, 32), (1, 3, 49, 49)),  # Swin: windows of 7 x 7
        ((512, 256, 4, 32), (1, 4, 256, 256)),  # AlphaFold: a bias of pairs for all rows
        ((16, 2048, 8, 64), (1, 8, 1, 2048)),
        ((16, 2048, 8, 64), (1, 1, 1, 1)),
    ],
)
def test_the_gradient_of_a_broadcast_bias_fills_a_gpu(q_shape, bias_shape):
    """At least two programs for each of an H100's multiprocessors, where there was one for each tile; in bounded memory."""
    q, bias = jax.ShapeDtypeStruct(q_shape, jnp.bfloat16), jax.ShapeDtypeStruct(bias_shape, jnp.float32)
    backward = lambda q, k, v, do, bias: jax.vjp(lambda bias: jflash.attention(q, k, v, bias=bias), bias)[1](do)
    (programs,) = grids(machine_code.lower_for(backward, q, q, q, q, bias, gpu="h100"), "jflash_dbias")
    assert 2 * GPUS["h100"].multiprocessors <= programs < 4 * 188, "one tile of float32 each"


@pytest.mark.whole
@needs_compiler
def test_offsets_into_a_mask_of_bytes_do_not_overflow():
    # Between 2**31 and 2**32 bytes, offsets in 32 bits wrap around: two bytes for each pair then.
    mask = jax.ShapeDtypeStruct((1, 1, 50_000, 50_000), bool)
    q, k, v, _ = avals(1, 50_000, 1, 16, jnp.bfloat16)
    lowered = machine_code.lower_for(lambda q, k, v, mask: jflash.attention(q, k, v, mask=mask), q, k, v, mask, gpu="h100")
    offsets = offset_types(lowered)
    assert offsets.keys() == {"jflash_forward", "jflash_key_seen"}
    assert all({"i64"} in types for types in offsets.values())
    assert "tensor<1x1x50000x50000xi16>" in lowered.as_text()


@pytest.mark.whole
@needs_compiler
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_offsets_into_large_arrays_have_64_bits(causal):
    # More than 2**31 elements each: q, k, v and their like have 3 * 2**34, what there is one of a row 3 * 2**30.
    lowered = machine_code.lower_for(attention(causal), *avals(3, 2**17, 2**13, 16, jnp.bfloat16), gpu="h100")
    arrays = {"jflash_forward": 6, "jflash_delta": 7, "jflash_dkv": 8, "jflash_dq": 7}
    offsets = offset_types(lowered)
    assert {name: len(types) for name, types in offsets.items()} == arrays
    for name, types in offsets.items():
        assert types == [{"i64"}] * arrays[name], name


def offset_types(lowered) -> dict[str, list[set[str]]]:
    """Of each kernel, by name: for each of its arrays, operands and results, the types of the offsets into it."""
    found = {}
    for call in operations(lowered.compiler_ir("stablehlo"), "stablehlo.custom_call"):
        kernel = call.attributes["mhlo.backend_config"]
        with mlir.make_ir_context() as context:
            triton.register_dialect(context)
            context.load_all_available_dialects()
            module = ir.Module.parse(kernel["ir"].value_bytes)
            (function,) = operations(module, "tt.func")
            found[kernel["name"].value] = types = [set() for _ in function.regions[0].blocks[0].arguments]
            for pointer, offset in (addition.operands for addition in operations(module, "tt.addptr")):
                while not isinstance(pointer.owner, ir.Block):  # back through what only reshapes it
                    pointer = pointer.owner.operands[0]
                types[ir.BlockArgument(pointer).arg_number].add(str(element_type(offset)))
    return found


def grids(lowered, name) -> list[int]:
    """Of each launch of a kernel, how many programs there are."""
    calls = operations(lowered.compiler_ir("stablehlo"), "stablehlo.custom_call")
    configs = [call.attributes["mhlo.backend_config"] for call in calls]
    sides = "grid_x", "grid_y", "grid_z"
    return [math.prod(config[side].value for side in sides) for config in configs if config["name"].value == name]


def element_type(value):
    """The type of a scalar, or of the elements of a tile."""
    return value.type.element_type if isinstance(value.type, ir.RankedTensorType) else value.type


def operations(module, name: str) -> list:
    """The operations of a module that have some name."""
    found = []

    def visit(operation):
        if operation.name == name:
            found.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found


# ------------------------------------------------------------------------------------------------- the reader itself

SASS = """
.text.kernel:
        /*0000*/                   MOV R1, c[0x0][0x28] ;
.L_x_1:
        /*0010*/                   LDSM.16.M88.4 R4, [R2] ;
.L_x_0:
        /*0020*/                   HMMA.16816.F32.BF16 R8, R4, R6, R8 ;
        /*0030*/                   HMMA.1688.F32.TF32 R8, R4, R6, R8 ;
        /*0040*/                   FFMA.FTZ R9, R9, R10, R11 ;
        /*0050*/              @P0 BRA `(.L_x_0) ;
        /*0060*/             @!P1 BRA `(.L_x_1) ;
        /*0070*/              @P2 BRA `(.L_x_2) ;
.L_x_2:
        /*0080*/                   EXIT ;
.L_x_3:
        /*0090*/                   BRA `(.L_x_3);
"""


def test_loops_are_found_and_counted():
    inner, outer = loops.find_loops(SASS, GPUS["a100"])
    assert (inner.start, inner.end, outer.start, outer.end) == (0x20, 0x50, 0x10, 0x60)
    assert outer.contains(inner)
    assert not inner.contains(outer)
    # 16 x 8 x 16 products at 256 a cycle; 16 x 8 x 8 in TF32 at half that rate; an A100 has 64 lanes for FFMA.
    assert inner.cycles == {"issue": 4, "tensor": 8 + 8, "fma": 2}
    assert outer.cycles == {"issue": 6, "tensor": 16, "fma": 2, "memory": 4}
    assert inner.opcodes == {"HMMA": 2, "FFMA": 1, "BRA": 1}


@pytest.mark.parametrize(
    ("text", "cycles"),
    [("HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], RZ", 64), ("HGMMA.64x64x8.F32.TF32 R24", 32), ("FFMA R1, R2, R3", 0)],
)
def test_cycles_of_a_product_on_h100(text, cycles):
    assert loops.tensor_cycles(text, GPUS["h100"]) == cycles


WAITING = """
.L_x_0:
        /*0000*/                   WARPGROUP.ARRIVE ;
        /*0010*/                   HGMMA.64x128x16.F32.BF16 R88, gdesc[UR16], RZ, !UPT, gsb0 ;
        /*0020*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0030*/                   DEPBAR.LE SB0, 0x1 ;
        /*0040*/              @P0 BRA `(.L_x_0) ;
"""


def test_waits_for_products_are_counted():
    (loop,) = loops.find_loops(WAITING, GPUS["h100"])
    assert (loop.opcodes["HGMMA"], loop.waits) == (1, 1)
    assert "5 instructions (1 waits for 1 HGMMA)" in str(loop)


ENCODED = """
        /*0d50*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;     /* 0x00008000000079c5 */
                                                                       /* 0x000fe40000010000 */
        /*0d60*/              @!P0 MUFU.EX2 R11, R88 ;                 /* 0x00000059580b7209 */
                                                                       /* 0x00086c0000000800 */
"""


def test_control_codes_are_decoded():
    wait, exponential = pipeline.decode(ENCODED, 0xD50, 0xD60)
    assert wait == ("WARPGROUP.DEPBAR.LE gsb0, 0x0 ", "WARPGROUP", 2, None, None, ())
    # 0x00086c >> 9: 6 cycles, 1 of yield, barrier 1 for its result, 4 for its operands.
    assert exponential == ("MUFU.EX2 R11, R88 ", "MUFU", 6, 1, 4, ())
    assert pipeline.decode(ENCODED, 0xD60, 0xD60) == [exponential]


def step(text, stall=1, written=None, waits=()):
    return pipeline.Step(text, text.split(".")[0].split(" ")[0], stall, written, None, waits)


PRODUCT, WAIT = step("HGMMA.64x128x16.F32.BF16 R88, gdesc[UR16], RZ, gsb0"), step("WARPGROUP.DEPBAR.LE gsb0, 0x0")


def test_the_estimate_of_loops_that_can_be_counted_by_hand():
    cycles = lambda steps, blocks=1, threads=128: pipeline.simulate(steps, GPUS["h100"], blocks, threads).cycles
    about = functools.partial(pytest.approx, rel=0.03)
    assert cycles([step("IADD3 R1", stall=5)]) == about(5)
    assert cycles([step("IADD3 R1", stall=5)], blocks=2) == about(5), "the other block fills the gaps"
    exponential = [step("MUFU.EX2 R1", written=0), step("FADD R1", waits=(0,))]
    assert cycles(exponential) == about(8 + pipeline.LATENCIES["MUFU"] + 1)
    assert cycles(exponential, blocks=8) == about(64), "eight cycles of the pipe each"
    # Products one behind the other take their 64 cycles; waited for, the latency of each besides.
    in_series = cycles([PRODUCT, WAIT] * 4)
    assert cycles([PRODUCT] * 4) == about(256)
    assert in_series == about(4 * (64 + pipeline.LATENCIES["products"] + 1))
    assert cycles([PRODUCT, WAIT] * 4, blocks=2) < 2 * in_series
    # A barrier of a block waits for all of its warps: two in each quarter.
    assert cycles([step("BAR.SYNC"), PRODUCT, WAIT], threads=256) >= 128


LOSS = "ptxas info    : (C75{}) Potential Performance Loss: wgmma.mma_async instructions are serialized due to {}"


@pytest.mark.parametrize(
    ("message", "reasons"),
    [
        (LOSS.format(11, "a lack of registers in the function 'kernel' in line 467"), ["C7511: a lack of registers"]),
        (LOSS.format(10, "a lack of registers for the function 'kernel'"), ["C7510: a lack of registers"]),
        (LOSS.format(14, "ill formed pipeline stage in the function 'kernel'") + "\nptxas info    : 0 bytes gmem\n" +
         LOSS.format(12, "calls"), ["C7514: ill formed pipeline stage", "C7512: calls"]),
        ("ptxas info    : Used 240 registers, used 1 barriers", []),
    ],
)  # fmt: skip
def test_what_ptxas_says_of_products_in_series(message, reasons):
    assert serialized(message) == tuple(reasons)


@needs_compiler
def test_a_kernel_tells_that_its_products_are_waited_for_one_by_one():
    """128x128 with 4 warps at head_dim 64, as few instructions as it has: ptxas finds too few registers."""
    for block_kv, series in ((128, True), (64, False)):
        launch = jflash.BlockSizes(block_q=128, block_kv=block_kv, num_warps=4, num_stages=2)
        attend = functools.partial(jflash.attention, block_sizes=launch)
        program = machine_code.compile_for(attend, *avals(2, 4096, 4, 64, jnp.bfloat16)[:3], gpu="h100")
        kernel = program["jflash_forward"]
        assert bool(kernel.serialized) == ("SERIALIZED, C75" in str(kernel)) == series
        assert kernel.hot is not None
        assert (kernel.hot.waits >= kernel.hot.opcodes["HGMMA"]) == series
        assert series or kernel.hot.waits <= kernel.ptx.count("wgmma.wait_group")


@pytest.mark.whole
@needs_compiler
@pytest.mark.parametrize(("gpu", "instruction"), [("l4", "HMMA"), ("h100", "HGMMA"), ("b200", "UTCHMMA")])
def test_what_a_kernel_tells(gpu, instruction):
    program = machine_code.compile_for(jflash.attention, *avals(2, 1024, 4, 64)[:3], gpu=gpu)
    kernel = program["jflash_forward"]
    assert kernel.tensor_cores == instruction
    assert f" {instruction}" in kernel.sass
    assert 16 <= kernel.registers <= 255
    assert kernel.threads % 32 == 0
    assert kernel.grid[1:] == (4, 2)
    assert kernel.blocks_per_multiprocessor is None or kernel.blocks_per_multiprocessor >= 1
    assert kernel.loops
    assert (kernel.issue_per_tensor is None) == (gpu == "b200")
    assert "jflash_forward" in str(kernel)
    assert "custom-call" in program.text
    with pytest.raises(KeyError, match=r"jflash_dkv.*jflash_forward"):
        program["jflash_dkv"]


@pytest.mark.parametrize(
    ("registers", "threads", "shared", "blocks"),
    [(255, 128, 0, 2), (128, 256, 100 * 1024, 2), (128, 256, 114 * 1024, 1), (16, 128, 0, 16), (16, 32, 0, 32)],
)
def test_blocks_on_a_multiprocessor_of_an_h100(registers, threads, shared, blocks):
    kernel = machine_code.Kernel("k", GPUS["h100"], (1,), threads, shared, module="")
    kernel.__dict__["_assembled"] = Assembled(registers, spill_bytes=0, static_shared_bytes=0, serialized=(), cubin=b"")
    assert kernel.blocks_per_multiprocessor == blocks


def test_missing_wheels_are_named(monkeypatch):
    monkeypatch.setattr(compiler, "missing_wheels", lambda: ["nvidia-nvvm"])
    with pytest.raises(ModuleNotFoundError, match="nvidia-nvvm"):
        compiler.devices.__wrapped__("h100")


@pytest.mark.whole
@pytest.mark.parametrize("lengths", [(64, 64), (100, 64), (64, 100), (1, 257), (1000, 1000)])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": 5}, {"causal": True, "q_offset": 7}])
def test_any_length_lowers(lengths, options):
    # Known and traced ranges lower differently: a select between two known ints was once refused.
    q, k = (jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32) for length in lengths)
    loss = lambda q, k, v: jnp.sum(jflash.attention(q, k, v, **options) ** 2)
    assert set(kernels(machine_code.lower_for(jax.grad(loss, (0, 1, 2)), q, k, k, gpu="h100"))) == {
        "jflash_forward", "jflash_delta", "jflash_dkv", "jflash_dq"
    }  # fmt: skip


def kernels(lowered: jax.stages.Lowered) -> list[str]:
    """The names of the kernels in a lowered program."""
    return re.findall(r'name = "(jflash_\w+)"', lowered.as_text())
