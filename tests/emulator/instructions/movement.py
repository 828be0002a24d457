"""Values from place to place: mov, loads, stores, and copies that arrive later."""

from emulator import types
from emulator.errors import Unknown
from emulator.parser import Address, Instruction, Integer, Not, Register, Symbol, Vector
from emulator.translator import Translator, instruction, parts

HINTS = ("L1", "L2", "evict", "level")  # to the caches, which are not emulated


@instruction("mov")
def mov(t: Translator, i: Instruction):
    target, source = i.operands
    view = "?" if i.kind == "pred" else f"u{types.bytes_of(i.kind)}"
    if isinstance(target, Vector):
        part = types.bytes_of(i.kind) // len(target.parts)
        pieces = t.variable(f"{t.read_array(source, view)}.view(u{part}).reshape(-1, {len(target.parts)})")
        for n, register in enumerate(target.parts):
            t.write(register, f"u{part}", f"np.ascontiguousarray({pieces}[:, {n}])")
    elif isinstance(source, Vector):
        part = types.bytes_of(i.kind) // len(source.parts)
        pieces = ", ".join(t.read_array(x, f"u{part}") for x in source.parts)
        t.write(target, view, f"np.stack(({pieces}), axis=-1).view({view}).reshape(-1)")
    elif not (isinstance(target, Register) and isinstance(source, Register) and t.alias(target, source)):
        t.write(target, view, t.read_array(source, view))


def _space(i: Instruction) -> str:
    """global, shared or param."""
    space = i.modifiers[0].partition("::")[0]
    if space not in ("global", "shared", "param") or {"volatile", "relaxed", "acquire", "release"} & set(i.modifiers):
        raise Unknown(f"the state space {i.modifiers[0]}")
    return space


@instruction("ld")
def ld(t: Translator, i: Instruction):
    target, source = i.operands
    space, size, targets = _space(i), types.bytes_of(i.kind), parts(target)
    assert isinstance(source, Address)
    if space == "param":
        if not isinstance(source.base, Symbol) or source.offset or size != 8:
            raise Unknown("a part of a parameter")
        return t.write(target, "u8", f"M.parameter({source.base.name!r})")
    loaded = t.variable(f"M.{_memory(space)}.load({t.address(source)}, {t.mask()}, {size}, {len(targets)}, {t.site})")
    for n, register in enumerate(targets):
        width = t.width(register, 8 * size) // 8
        if width == size:
            t.write(register, f"u{size}", f"{loaded}[{n}]")
        elif types.signed(i.kind):
            t.write(register, f"i{width}", f"{loaded}[{n}].view(i{size}).astype(i{width})")
        else:
            t.write(register, f"u{width}", f"{loaded}[{n}].astype(u{width})")
    return None


@instruction("st")
def st(t: Translator, i: Instruction):
    target, source = i.operands
    space, size = _space(i), types.bytes_of(i.kind)
    values = [f"{t.read_array(x, f'u{t.width(x, 8 * size) // 8}')}.astype(u{size}, copy=False)" for x in parts(source)]
    t.emit(f"M.{_memory(space)}.store({t.address(target)}, {t.mask()}, {size}, ({', '.join(values)},), {t.site})")


def _memory(space: str) -> str:
    return {"global": "arrays", "shared": "shared"}[space]


@instruction("cp")
def cp(t: Translator, i: Instruction):
    if i.modifiers[0] != "async" or {"bulk", "mbarrier"} & set(i.modifiers):
        raise Unknown("a copy other than cp.async")
    if "commit_group" in i.modifiers or "wait_group" in i.modifiers or "wait_all" in i.modifiers:
        if i.guard:
            raise Unknown("under a predicate")
        if "wait_group" not in i.modifiers:
            t.emit("M.copies.commit(m)")
        if "commit_group" not in i.modifiers:
            t.emit(f"M.copies.wait(m, {i.operands[0].value if i.operands else 0})")
        return
    target, source, size, *rest = i.operands
    assert isinstance(size, Integer)
    present = "None"
    if rest and (isinstance(rest[0], Not) or (isinstance(rest[0], Register) and t.bits(rest[0].name) == 1)):
        present = f"where({t.read_array(rest[0], '?')}, u4(0), u4({size.value}))"  # ignore-src
    elif rest:
        present = t.read_array(rest[0], "u4")
    t.emit(f"M.copies.issue({t.address(target)}, {t.address(source)}, {size.value}, {present}, {t.mask()}, {t.site})")
