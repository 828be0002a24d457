"""jflash.launches and jflash.tune: the search with a fake clock, the compiler without a GPU, and what later calls find."""

from __future__ import annotations

import dataclasses
import logging
import sys
import types

import chex
import jax
import jax.numpy as jnp
import pytest
from checks import needs_compiler, normal
from jax.experimental.compilation_cache import compilation_cache

import jflash
from jflash import derivatives, machine_code
from jflash.kernels import Inputs, Launcher, Triton
from jflash.launch import blocks, gpu, user_cache
from jflash.launch.table import Entry, Key, Launch
from jflash.machine_code import GPUS
from jflash.proof.cases import SCORE_FNS
from jflash.score.score import Score
from jflash.tile import Rows
from jflash.tuning import probe, progress, tuner
from jflash.tuning import tune as tuning
from jflash.tuning.probe import Bench, Built, Refused
from jflash.tuning.tuner import Tuner

FAMILIES = sorted({gpu.family(target.kind) for target in GPUS.values()})
SHIPPED = {family: blocks.shipped(family) for family in FAMILIES}
H100 = GPUS["h100"]
KEY = Key("forward", 16, 64, 64, "plain", 1024, 1024)
DEFAULT = Launch(128, 64, 4, 2)


# -------------------------------------------------------------------------------------------- the search, a fake clock


class FakeGPU:
    """Kernels that take as long as `seconds` says, by a clock that only they and the compiler move."""

    def __init__(
        self,
        seconds,
        spills=lambda launch: 0,
        fits=lambda launch: True,
        jitter=0.0,
        compiling=1.0,
        serialized=lambda launch: (),
    ):
        self.seconds, self.spills, self.fits, self.jitter, self.compiling = seconds, spills, fits, jitter, compiling
        self.serialized = serialized
        self.now, self.built, self.ran, self.said = 0.0, [], set(), []

    def clock(self) -> float:
        return self.now

    def build(self, kernel: str, launch: Launch) -> Built:
        self.now += self.compiling
        self.built.append(launch)
        if not self.fits(launch):
            raise Refused("shared memory")

        def run(times: int) -> None:
            self.ran.add(launch)
            mood = 1 + self.jitter * (int(1e6 * self.now) % 3)  # some runs are slower
            self.now += times * self.seconds(launch) * mood

        return Built(self.spills(launch), run, self.serialized(launch))

    def fastest(self, seconds=1e6, default=DEFAULT, key=KEY):
        search = Tuner(self.build, self.clock, lambda *said: self.said.append(said))
        return search.fastest(key.kernel, default, tuner.candidates(key, default, H100.shared_per_block), seconds)


def similar(launch: Launch, to: Launch) -> float:
    """Seconds that are least at `to`."""
    return 1e-3 * (1 + sum(abs(x - y) for x, y in zip(dataclasses.astuple(launch), dataclasses.astuple(to), strict=True)))


def test_the_fastest_that_fits_and_does_not_spill():
    best = Launch(64, 128, 8, 3)
    spills = lambda launch: 100 if launch.block_kv == 256 else 0
    fake = FakeGPU(lambda launch: 1e-9 if spills(launch) else similar(launch, best), spills, lambda x: x.num_stages < 4, 0.01)
    timed = fake.fastest()
    assert timed.launch == best
    assert timed.spill_bytes == 0
    assert timed.seconds == pytest.approx(1e-3, rel=0.03)
    assert any(spills(launch) for launch in fake.built)
    assert not any(spills(launch) for launch in fake.ran), "what spills is never run"
    assert not any(launch.num_stages == 4 for launch in fake.ran)
    notes = " ".join(note for *_, note in fake.said)
    assert "128 x 64, 4 warps, 2 stages: fits" in notes
    assert "spills 100 bytes" in notes
    assert "does not fit" in notes


def test_launches_that_wait_for_each_product_are_refused():
    serialized = lambda launch: ("C7511: insufficient register resources",) if launch.block_kv == 128 else ()
    fake = FakeGPU(lambda launch: similar(launch, Launch(128, 128, 4, 2)))
    fake.serialized = serialized
    assert fake.fastest().launch == DEFAULT
    assert any(serialized(launch) for launch in fake.built)
    assert not any(serialized(launch) for launch in fake.ran), "what is serialized is never run"
    assert "waits for each product (C7511: insufficient register resources)" in " ".join(note for *_, note in fake.said)


@pytest.mark.parametrize(("gain", "kept"), [(0.01, True), (0.05, False)])
def test_the_default_stays_unless_beaten_by_more_than_noise(gain, kept):
    fake = FakeGPU(lambda launch: 1e-3 if launch == DEFAULT else 1e-3 * (1 - gain))
    assert (fake.fastest().launch == DEFAULT) == kept


def test_a_default_that_spills_is_what_others_are_compared_with():
    fake = FakeGPU(lambda launch: 1e-3 if launch == DEFAULT else 2e-3, lambda launch: 8 if launch == DEFAULT else 0)
    timed = fake.fastest()
    assert (timed.launch, timed.spill_bytes) == (DEFAULT, 8)


def test_a_default_that_does_not_fit_is_replaced_and_no_launch_at_all_is_an_error():
    fake = FakeGPU(lambda launch: similar(launch, DEFAULT), fits=lambda launch: launch != DEFAULT)
    assert fake.fastest().launch != DEFAULT
    with pytest.raises(RuntimeError, match="no launch of forward, not even the default"):
        FakeGPU(lambda launch: 1e-3, fits=lambda launch: False).fastest()


def test_time_is_kept():
    fake = FakeGPU(lambda launch: 0.1, compiling=10.0)
    fake.fastest(seconds=100.0)
    assert 100 * tuner.COMPILING / 10.1 - 1 <= len(fake.built) <= 100 * tuner.COMPILING / 10 + 1
    assert 75 <= fake.now <= 130
    assert fake.built[0] == DEFAULT
    near = [tuple(dataclasses.astuple(launch)) for launch in fake.built[1:]]
    assert all(sum(x != y for x, y in zip(launch, dataclasses.astuple(DEFAULT), strict=True)) == 1 for launch in near)
    assert any("no time for the other" in note for *_, note in fake.said)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_shipped_could_be_a_candidate(family):
    """The bound that spares the compiler what cannot fit leaves what is known to fit."""
    for entry in SHIPPED[family]:
        shared = GPUS[entry.gpu.lower()].shared_per_block
        assert tuner._may_fit(entry.key, entry.launch, shared), entry
        others = tuner.candidates(entry.key, entry.launch, shared)
        assert entry.launch not in others
        assert len(set(others)) == len(others) > 3, entry


def test_progress_with_and_without_rich(capsys, monkeypatch):
    with progress.shown() as say:
        say("forward", 1, 2, "32 x 32: fits")
        say("forward", 2, 2, "64 x 32: spills 8 bytes")
    assert "64 x 32: spills 8 bytes" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setitem(sys.modules, "rich", None)
    with progress.shown() as say:
        say("forward", 1, 2, "32 x 32: fits")
    assert capsys.readouterr().err == "forward 1/2: 32 x 32: fits\n"


# ---------------------------------------------------------------------------------------- tune(), without its GPU


@pytest.fixture
def h100(tmp_path, monkeypatch):
    """A process that seems to have an H100, for all that tune() asks of it, with an empty cache."""
    device = type("Device", (), {"device_kind": H100.kind, "platform": "gpu", "compute_capability": "9.0"})()
    fake = FakeGPU(lambda launch: similar(launch, Launch(32, 32, 4, 1)))
    fake.inputs = []
    monkeypatch.setenv("JFLASH_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(gpu, "kind", lambda: H100.kind)
    monkeypatch.setattr(tuning, "_gpu_at_hand", lambda: machine_code.like(device))
    monkeypatch.setattr(tuning, "time", types.SimpleNamespace(perf_counter=fake.clock))

    def bench(*problem):
        fake.inputs.append(problem)
        return fake

    monkeypatch.setattr(Bench, "of", bench)
    derivatives.attend_jitted.clear_cache()
    yield fake
    derivatives.attend_jitted.clear_cache()


def launched(caplog) -> dict[str, str]:
    """What the log says of each kernel that was traced since this was asked last."""
    lines = [record.getMessage().partition(": ")[2] for record in caplog.records if record.levelno == logging.DEBUG]
    caplog.clear()
    return {line.partition(" ")[0]: line for line in lines}


def test_later_calls_find_what_was_tuned(h100, caplog, capsys, quickly_compiled):
    caplog.set_level(logging.DEBUG, logger="jflash")
    q, kv, bias = jnp.ones((1, 40, 2, 16)), jnp.ones((1, 40, 1, 16)), jnp.zeros((2, 1, 40))
    call = lambda: jflash.attention(q, kv, kv, bias=bias, causal=True, implementation="interpret")  # launched as on the GPU
    call()
    assert "machine code" in launched(caplog)["forward"]
    call()
    assert not launched(caplog), "what was compiled is kept"
    with jax.disable_jit():
        call()
        assert "machine code" in launched(caplog)["forward"]
        call()
        assert not launched(caplog), "of each operation, what was compiled is kept"

    measured = jflash.tune(q, kv, kv, bias=bias, causal=True, minutes=1e6)
    assert list(measured) == ["forward", "dkv", "dq", "dscore"]
    for kernel, entry in measured.items():
        assert entry.launch == Launch(32, 32, 4, 1)
        assert entry.key == Key(kernel, 32, 16, 16, "general", 32, 32)
        assert (entry.origin, entry.gpu, entry.spill_bytes) == ("measured", H100.kind, 0)
        assert entry.microseconds == pytest.approx(1000)
    assert "forward" in capsys.readouterr().err

    launched(caplog)
    call()
    assert "32 x 32, 4 warps, 1 stages; measured" in launched(caplog)["forward"]
    with jax.disable_jit():
        call()
    assert "32 x 32, 4 warps, 1 stages; measured" in launched(caplog)["forward"]
    assert jflash.launches(q, kv, kv, bias=bias, causal=True) == {**measured, "delta": Entry(
        Key("delta", 32, 16, 16, "general", 32, 32), Launch(128, 16, 4, 1), "rule"
    )}  # fmt: skip
    assert jflash.launches(q, kv, kv)["forward"].origin == "machine code", "of other options nothing was measured"


@pytest.mark.whole
@needs_compiler
def test_a_program_for_that_gpu_is_launched_as_tuned(tmp_path, monkeypatch):
    monkeypatch.setenv("JFLASH_CACHE_DIR", str(tmp_path))
    q, kv = (jax.ShapeDtypeStruct((2, 896, heads, 40), jnp.bfloat16) for heads in (4, 2))
    key = Key("forward", 16, 40, 40, "plain", 1024, 1024)
    user_cache.keep(H100.kind, [Entry(key, Launch(32, 64, 2, 1), "measured", H100.kind, "2026-11-30", "jax")])
    with jax.set_mesh(jax.sharding.Mesh(machine_code.devices("h100"), ("device",))):
        found = jflash.launches(q, kv, kv)
    assert found["forward"].table == str(tmp_path / "NVIDIA_H100_80GB_HBM3.json")
    assert found["dq"].table == "jflash/launch/tuned/hopper.json"
    kernel = machine_code.compile_for(jflash.attention, q, kv, kv, gpu="h100")["jflash_forward"]
    assert (kernel.grid, kernel.threads) == ((896 // 32, 4, 2), 64)


def test_launches_of_shapes_are_those_of_arrays():
    q, kv = jnp.ones((2, 50, 4, 24), jnp.float16), jnp.ones((2, 70, 2, 24), jnp.float16)
    v = jnp.ones((2, 70, 2, 80), jnp.float16)
    arrays = {
        "bias": jnp.zeros((1, 4, 1, 70)),
        "score_args": (jnp.ones(4),),
        "segment_ids": (jnp.zeros((2, 50), jnp.int32), jnp.zeros((2, 70), jnp.int32)),
    }
    static = {"score_fn": SCORE_FNS["alibi"], "causal": True, "q_offset": 3, "block_sizes": jflash.BlockSizes(num_warps_dkv=2)}
    found = jflash.launches(q, kv, v, **arrays, **static)
    assert list(found) == ["forward", "delta", "dkv", "dq", "dscore"]
    assert found["dkv"].origin == "block_sizes"
    assert found["dkv"].launch.num_warps == 2
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (q, kv, v, arrays))
    assert jflash.launches(*shapes[:3], **shapes[3], **static) == found
    one = jflash.launches(q[0], kv[0], v[0], causal=True)
    assert list(one) == ["forward", "delta", "dkv", "dq"]
    assert one["forward"].key == Key("forward", 16, 128, 128, "plain")


def test_what_tune_and_launches_do_not_take():
    q = jnp.ones((1, 20, 2, 16))
    with pytest.raises(RuntimeError, match="measures on an NVIDIA GPU; this process runs on cpu"):
        jflash.tune(q, q, q)
    with pytest.raises(ValueError, match="block_sizes must not be given"):
        jflash.tune(q, q, q, block_sizes=jflash.BlockSizes(block_q=32))
    with pytest.raises(ValueError, match="minutes must be a positive number, got 0"):
        jflash.tune(q, q, q, minutes=0)
    with pytest.raises(TypeError, match=r"outside of jax\.jit"):
        jax.jit(jflash.tune)(q, q, q)
    with pytest.raises(TypeError, match=r"block_sizes must be a jflash\.BlockSizes or None, got 64"):
        jflash.launches(q, q, q, block_sizes=64)
    with pytest.raises(TypeError, match="but return_lse, got casual"):
        jflash.launches(q, q, q, casual=True)
    with pytest.raises(ValueError, match=r"no launch to choose: .*head_dim of at most 256, got 300"):
        jflash.launches(*[jnp.ones((1, 20, 2, 300))] * 3)
    with pytest.raises(ValueError, match="where q, k or v is empty"):
        jflash.launches(q[:, :0], q, q)
    with pytest.raises(ValueError, match="k must have the head_dim of q"):
        jflash.launches(q, q[..., :8], q)


def test_tune_needs_a_place_for_its_result_and_an_assembler(monkeypatch):
    q = jnp.ones((1, 20, 2, 16))
    device = type("Device", (), {"device_kind": "NVIDIA A10G", "platform": "gpu", "compute_capability": "8.6"})()
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [device])
    monkeypatch.setattr(user_cache, "directory", lambda: None)
    monkeypatch.setattr(machine_code, "missing_wheels", lambda: [])
    assert tuning._gpu_at_hand() == dataclasses.replace(GPUS["l4"], kind="NVIDIA A10G", capability=(8, 6))
    with pytest.raises(ModuleNotFoundError, match="set JFLASH_CACHE_DIR, or install platformdirs"):
        jflash.tune(q, q, q)
    monkeypatch.setattr(machine_code, "missing_wheels", lambda: ["nvidia-cuda-nvcc"])
    with pytest.raises(ModuleNotFoundError, match="pip install nvidia-cuda-nvcc"):
        jflash.tune(q, q, q)
    device.compute_capability = "gfx942"
    with pytest.raises(RuntimeError, match=r"an NVIDIA GPU is needed, got NVIDIA A10G \(gpu\)"):
        machine_code.like(device)


# ---------------------------------------------------------------------------------------------- the bench, interpreted


@pytest.mark.whole
def test_the_bench_runs_what_attention_runs(monkeypatch):
    """Each kernel alone, in the interpreter: what the tuner times is the forward and the gradients of the call."""
    results = []

    def compile_here(fn, inputs):
        of = lambda name, n: types.SimpleNamespace(name=name, spill_bytes=n, serialized=(f"C75{n}: registers",))
        found = [of("jflash_kernel", 8), of("fusion", 99)]
        return lambda inputs: results.append(jax.jit(fn)(inputs)), types.SimpleNamespace(kernels=found)

    monkeypatch.setattr(machine_code, "compile_here", compile_here)
    q, k, v = normal(2, 40, 4, 16), normal(2, 40, 2, 16, seed=1), normal(2, 40, 2, 8, seed=2)
    arrays = {"bias": normal(4, 1, 40, seed=3), "score_args": (normal(4, seed=4),), "sinks": normal(4, seed=5)}
    ids = jnp.repeat(jnp.arange(4), 10)[None].repeat(2, 0)
    options = {"causal": True, "segment_ids": ids, "score_fn": SCORE_FNS["alibi"]}
    bench = Bench.of(*tuning._Problem.of(q, k, v, {**options, **arrays})[:4], Triton(interpret=True))
    for kernel in ("forward", "dkv", "dk", "dv", "dq", "dscore"):
        built = bench.build(kernel, Launch(32, 16, 4, 1))
        assert (built.spill_bytes, built.serialized) == (8, ("C758: registers",))
        built.run(2)
    assert len(results) == 12, "two runs of each"
    (o, _), both, dk, dv, dq, (dbias, dargs) = results[::2]
    chex.assert_trees_all_equal(both, dk | dv)

    fn = lambda q, k, v, arrays: jflash.attention(q, k, v, **options, **arrays, implementation="naive")
    expected_o, backward = jax.vjp(fn, q, k, v, arrays)
    expected = backward(bench.inputs.do)
    got = dq, both["dk"], both["dv"], {"bias": dbias[0], "score_args": dargs}
    expected[3].pop("sinks")
    chex.assert_trees_all_close((o, got), (expected_o, expected), atol=1e-4)


# ------------------------------------------------------------------------------------------- the compiler, without a GPU


def arguments(key: Key) -> Inputs:
    """What a kernel reads, of a call with what makes it large: a causal mask, grouped heads, a bias where it is general."""
    length, heads, kv_heads = 1024, 4, 2
    dtype = {16: jnp.bfloat16, 32: jnp.float32}[key.bits]
    array = lambda heads, width: jax.ShapeDtypeStruct((2, length, heads, width), dtype)
    row = jax.ShapeDtypeStruct((2, heads, length), jnp.float32)
    q, k = array(heads, key.head_dim), array(kv_heads, key.head_dim)
    bias = jax.ShapeDtypeStruct((1, heads, length, length), jnp.bfloat16) if key.options == "general" else None
    score = jax.eval_shape(lambda q, k, bias: Score.of(q, k, causal=True, bias=bias), q, k, bias)
    rows = Rows(None if score.plain else row, row, row)
    return Inputs(q, k, array(kv_heads, key.v_dim), array(heads, key.v_dim), rows, score)


@pytest.fixture
def no_gpu(monkeypatch):
    """Bench.build() for an H100 that is not there."""
    compiled = lambda fn, *avals: (None, machine_code.compile_for(fn, *avals, gpu="h100"))
    monkeypatch.setattr(machine_code, "compile_here", compiled)


@pytest.mark.whole
@needs_compiler
def test_the_bench_tells_what_spills_what_waits_and_what_does_not_fit(no_gpu):
    bench = Bench(arguments(dataclasses.replace(KEY, options="general")), Triton())
    assert bench.build("dscore", Launch(32, 32, 4, 1)).spill_bytes == 0
    assert bench.build("forward", Launch(128, 128, 4, 1)).spill_bytes > 0
    plain = Bench(arguments(KEY), Triton())
    assert "C75" in "".join(plain.build("forward", Launch(128, 128, 4, 2)).serialized)
    assert plain.build("forward", Launch(128, 64, 4, 2)).serialized == ()
    with pytest.raises(Refused, match="Shared memory size limit exceeded"):
        bench.build("dq", Launch(64, 256, 8, 4))


ENTRIES = [pytest.param(entry, id=f"{family} {entry.key.kernel} {entry.key.bits} {entry.key.head_dim}/{entry.key.v_dim} "
                        f"{entry.key.options}") for family in FAMILIES for entry in SHIPPED[family]]  # fmt: skip


@pytest.mark.whole
@needs_compiler
@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="tables are made with the newest JAX; test_machine_code has all")
@pytest.mark.parametrize("entry", ENTRIES)
def test_every_shipped_entry_compiles_and_spills_no_more_than_it_says(entry):
    fn = lambda inputs: probe.call(entry.key.kernel, inputs, Launcher(entry.launch))
    program = machine_code.compile_for(fn, arguments(entry.key), gpu=entry.gpu.lower())
    (kernel,) = (found for found in program.kernels if found.name.startswith("jflash_"))
    assert kernel.tensor_cores
    assert not kernel.serialized
    # Another compiler may spill a little more or less; where it gives up on a loop, it is 9000 bytes and more.
    same_compiler = entry.versions == f"jax {jax.__version__}"
    assert kernel.spill_bytes <= (entry.spill_bytes if same_compiler else max(entry.spill_bytes, 2048))


@pytest.mark.whole
@needs_compiler
@pytest.mark.parametrize(("bits", "width"), [(16, 128), (16, 256), (32, 256)])
@pytest.mark.parametrize("kernel", ["forward", "dkv", "dq"])
def test_the_rule_fits_on_the_smallest_gpu(kernel, bits, width):
    key = Key(kernel, bits, width, width)
    fn = lambda inputs: probe.call(kernel, inputs, Launcher(blocks.rule(key)))
    machine_code.compile_for(fn, arguments(key), gpu="l4")


@pytest.mark.whole
@needs_compiler
def test_the_persistent_cache_of_jax_is_kept_out_and_kept(tmp_path):
    """What came out of it would tell nothing of registers and spills; nor is it filled with launches that lost."""
    settings = {"jax_compilation_cache_dir": str(tmp_path), "jax_persistent_cache_min_compile_time_secs": 0.0}
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        jax.jit(lambda x: x * 3 + 1)(jnp.ones(7)).block_until_ready()
        entries = len(list(tmp_path.iterdir()))
        assert entries
        for _ in range(2):
            assert machine_code.compile_for(jnp.sin, jax.ShapeDtypeStruct((1000,), jnp.float32), gpu="h100").kernels
        assert len(list(tmp_path.iterdir())) == entries
        assert jax.config.jax_compilation_cache_dir == str(tmp_path)
        jax.jit(lambda x: x * 5 + 2)(jnp.ones(9)).block_until_ready()
        assert len(list(tmp_path.iterdir())) > entries, "it works on"
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()
