"""Which launch is taken: the tables, the user's cache, the rule, and how to see it."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys

import platformdirs
import pytest

import jflash
from jflash.launch import blocks, gpu, user_cache
from jflash.launch import table as launch_table
from jflash.launch.table import Entry, Key, Launch
from jflash.machine_code import GPUS

FAMILIES = sorted({gpu.family(target.kind) for target in GPUS.values()})
KEY = Key("forward", 16, 64, 64, "plain", 1024, 1024)
KIND = "NVIDIA H100 80GB HBM3"
PARAMETERS = {"block_q": 32, "block_kv": 16, "num_warps": 2, "num_stages": 3}
TUNED = Entry(KEY, Launch(**PARAMETERS), "measured", KIND, "2026-11-30", "jax 0.12.0", microseconds=12.5)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty user's cache, for an H100 that is traced for."""
    monkeypatch.setenv("JFLASH_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(gpu, "kind", lambda: KIND)
    return tmp_path


def entry(launch: int, **key) -> Entry:
    """An entry that can be told by its launch."""
    return dataclasses.replace(TUNED, key=dataclasses.replace(KEY, **key), launch=Launch(16, 16, 1, launch))


# ------------------------------------------------------------------------------------------------- what is shipped


@pytest.mark.parametrize("family", FAMILIES)
def test_shipped_tables_have_entries_for_every_call(family):
    table = blocks.shipped(family)
    assert {entry.origin for entry in table} <= {"machine code", "measured"}
    for bits in (16, 32):
        widest = Key("forward", bits, 256, 256, "general", 4096, 4096)
        has = lambda kernel, key=widest: launch_table.large_enough_for(table, dataclasses.replace(key, kernel=kernel))
        assert has("forward")
        assert has("dq")
        assert has("dkv") or (has("dk") and has("dv"))
    for entry in table:
        assert entry.gpu
        assert gpu.family(GPUS[entry.gpu.lower()].kind) == family


def test_dk_and_dv_are_apart_where_only_they_have_an_entry(monkeypatch):
    table = tuple(entry(1, kernel=kernel, head_dim=d, v_dim=d) for kernel, d in (("dkv", 64), ("dk", 128), ("dv", 128)))
    monkeypatch.setattr(blocks, "shipped", lambda family: table)
    apart = lambda **key: blocks.kernels_of_keys(dataclasses.replace(KEY, kernel="dkv", **key))
    assert apart() == ("dkv",)
    assert apart(v_dim=80) == ("dk", "dv")
    assert apart(v_dim=160) == ("dkv",), "by the rule"


@pytest.mark.parametrize("family", FAMILIES)
def test_shipped_tables_are_written_as_jflash_writes_them(family, tmp_path):
    # So that the next entry that jflash writes into one changes one line.
    text = (blocks.importlib.resources.files("jflash.launch") / f"tuned/{family}.json").read_text()
    launch_table.write(launch_table.read(text, "table"), tmp_path / "table.json")
    assert (tmp_path / "table.json").read_text() == text


# ------------------------------------------------------------------------------------------------- which one is taken


def test_the_least_entry_that_is_large_enough():
    table = [
        entry(1, head_dim=64, v_dim=64, q_len=None, kv_len=None),
        entry(2, head_dim=128, v_dim=128, q_len=None, kv_len=None),
        entry(3, head_dim=192, v_dim=128, q_len=None, kv_len=None),
        entry(4, head_dim=256, v_dim=256, q_len=None, kv_len=None),
        entry(5, head_dim=128, v_dim=128, q_len=None, kv_len=None, options="general"),
        entry(6, head_dim=128, v_dim=128, q_len=8192, kv_len=8192),
        entry(7, head_dim=64, v_dim=64, q_len=None, kv_len=None, kernel="dq"),
        entry(8, head_dim=64, v_dim=64, q_len=None, kv_len=None, bits=32),
    ]

    def found(**key):
        best = launch_table.large_enough_for(table, dataclasses.replace(KEY, **key))
        return best and best.launch.num_stages

    assert found() == 1
    assert found(head_dim=1, v_dim=33) == 1
    assert found(head_dim=80, v_dim=80) == 2
    assert found(head_dim=64, v_dim=128) == 2
    assert found(head_dim=160, v_dim=128) == 3
    assert found(head_dim=128, v_dim=160) == 4
    assert found(head_dim=80, v_dim=80, options="general") == 5
    assert found(options="general") == 1
    assert found(head_dim=128, v_dim=128, q_len=8192, kv_len=8192) == 6
    assert found(head_dim=128, v_dim=128, q_len=4096, kv_len=8192) == 2, "off by two: one for all lengths is nearer"
    assert found(kernel="dq", head_dim=32) == 7
    assert found(bits=32, head_dim=32) == 8
    assert found(kernel="dkv") is None


def test_what_was_tuned_holds_for_its_widths_and_the_nearest_lengths():
    table = [entry(1, q_len=256, kv_len=256), entry(2, q_len=1, kv_len=32768), entry(3, q_len=32768, kv_len=32768)]

    def found(**key):
        best = launch_table.tuned_for(table, dataclasses.replace(KEY, **key))
        return best and best.launch.num_stages

    assert found(q_len=256, kv_len=256) == 1
    assert found(q_len=1024, kv_len=2048) == 1
    assert found(q_len=8192, kv_len=8192) == 3
    assert found(q_len=4, kv_len=8192) == 2
    assert found(head_dim=32) is None
    assert found(options="general") is None


@pytest.mark.parametrize(("length", "expected"), [(0, 1), (1, 1), (3, 4), (90, 64), (91, 128), (1000, 1024), (4096, 4096)])
def test_length_classes(length, expected):
    assert launch_table.length_class(length) == expected


def test_order_of_look_up(cache, monkeypatch, caplog):
    with caplog.at_level(logging.DEBUG, logger="jflash"):
        assert blocks.default(KEY).table == "jflash/launch/tuned/hopper.json"
        path = user_cache.keep(KIND, [TUNED])
        found = blocks.default(KEY)
        assert found == dataclasses.replace(TUNED, table=str(path))
        assert jflash.BlockSizes(block_q_dq=64).over(found) == found
        chosen = jflash.BlockSizes(block_q=64).over(found)
        assert (chosen.launch, chosen.origin) == (dataclasses.replace(TUNED.launch, block_q=64), "block_sizes")
        monkeypatch.setattr(gpu, "kind", lambda: "NVIDIA H200")  # of one family, and of another kind
        assert blocks.default(KEY).table == "jflash/launch/tuned/hopper.json"
        assert blocks.default(dataclasses.replace(KEY, kernel="dscore")).origin == "rule"
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 4
    assert lines[1] == (
        f"traced for {KIND}: forward (16 bits, head_dim 64, v_dim 64, plain, 1024 x 1024): 32 x 16, 2 warps, 3 stages; "
        f"measured, {KIND}, 2026-11-30, jax 0.12.0, 12.5 µs; {path}"
    )


# ------------------------------------------------------------------------------------------------- the user's cache


def test_the_cache_keeps_one_entry_for_each_key(cache):
    other = entry(1, kernel="dq")
    better = dataclasses.replace(TUNED, microseconds=10.0)
    user_cache.keep(KIND, [TUNED, other])
    path = user_cache.keep(KIND, [better])
    assert path == cache / "NVIDIA_H100_80GB_HBM3.json"
    assert {dataclasses.replace(x, table=None) for x in user_cache.entries(KIND)} == {better, other}
    assert user_cache.entries("NVIDIA H200") == user_cache.entries(None) == ()
    assert len(path.read_text().splitlines()) == 4, "one line for each entry"
    assert list(cache.iterdir()) == [path], "nothing temporary is left"


def test_what_another_process_tunes_is_found(cache):
    assert user_cache.entries(KIND) == ()
    path = user_cache.keep(KIND, [TUNED])
    assert len(user_cache.entries(KIND)) == 1
    launch_table.write([TUNED, entry(1, kernel="dq")], path)
    assert len(user_cache.entries(KIND)) == 2


GOOD = launch_table.to_json(TUNED)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("[{", "Expecting"),
        ("{}", "must be a list"),
        (json.dumps([1]), "must be an object, got 1"),
        (json.dumps([{**GOOD, "block_q": 48}]), "block_q must be a power of two, at least 16, got 48"),
        (json.dumps([{**GOOD, "num_warps": "4"}]), "num_warps must be an int, got '4'"),
        (json.dumps([{**GOOD, "kernel": "backward"}]), "kernel must be one of .*got 'backward'"),
        (json.dumps([{**GOOD, "v_dim": 0}]), "v_dim must be an integer of at least 1, got 0"),
        (json.dumps([{**GOOD, "color": "red"}]), "must not have color"),
        (json.dumps([{k: x for k, x in GOOD.items() if k != "date"}]), "must have date"),
        (json.dumps([GOOD, GOOD]), "one entry for each key"),
    ],
)
def test_a_damaged_cache_is_named(cache, content, complaint):
    path = cache / "NVIDIA_H100_80GB_HBM3.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=rf"(?s){path} is not a table of launches: .*{complaint}.*Delete the file"):
        blocks.default(KEY)


def test_where_the_cache_is(tmp_path, monkeypatch):
    monkeypatch.delenv("JFLASH_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert str(user_cache.directory()) == platformdirs.user_cache_dir("jflash")
    monkeypatch.setitem(sys.modules, "platformdirs", None)
    assert user_cache.directory() is None
    assert user_cache.entries(KIND) == ()
    with pytest.raises(ModuleNotFoundError, match="set JFLASH_CACHE_DIR, or install platformdirs"):
        user_cache.keep(KIND, [TUNED])
    monkeypatch.setenv("JFLASH_CACHE_DIR", str(tmp_path))
    assert user_cache.keep(KIND, [TUNED]) == tmp_path / "NVIDIA_H100_80GB_HBM3.json"
