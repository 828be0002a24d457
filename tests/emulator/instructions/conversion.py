"""cvt: between all types that occur, in both directions of narrow and wide."""

from emulator import floats, types
from emulator.errors import Unknown
from emulator.parser import Instruction, Operand
from emulator.translator import Translator, instruction

ROUND_TO_INTEGER = {"rzi": "np.trunc({})", "rni": "np.rint({})", "rmi": "np.floor({})", "rpi": "np.ceil({})"}
FROM_16 = {"f16": floats.from_f16, "bf16": floats.from_bf16}
TO_16 = {"f16": floats.to_f16, "bf16": floats.to_bf16}


@instruction("cvta")
def cvta(t: Translator, i: Instruction):
    """Addresses of global memory are generic ones already; those of shared memory stay what they are."""
    if not {"global", "shared"} & set(i.modifiers):
        raise Unknown("a state space")
    t.elementwise(i, "u8", "{}.copy()" if "to" not in i.modifiers else "{}")


@instruction("cvt")
def cvt(t: Translator, i: Instruction):
    *modifiers, to, source = i.modifiers
    modifiers, operands = set(modifiers), i.operands[1:]
    known = {"ftz", *ROUND_TO_INTEGER}
    if to in ("f16x2", "bf16x2") and source == "f32":
        known = {"rn"}
        two = [t.call(TO_16[to[:-2]], t.read_array(x, "f4")) for x in reversed(operands)]
        view, result = "u4", f"({two[0]}.astype(u4) | {two[1]}.astype(u4) << u4(16))"
    elif to == "tf32":
        known = {"rn", "rna"}
        round_ = floats.to_tf32_away if "rna" in modifiers else floats.to_tf32_even
        view, result = "u4", t.call(round_, t.read_array(operands[0], "u4"))
    elif not types.floating(source) and not types.floating(to):
        known = set()
        view, result = _fitting(t, i, f"{_narrowed(t, operands[0], source)}.astype({types.view(to)})", to)
    elif not types.floating(source):
        known = {"rn"}
        view, result = _from_integer(t, _narrowed(t, operands[0], source), to)
    elif not types.floating(to):
        (mode,) = modifiers & set(ROUND_TO_INTEGER)
        rounded = ROUND_TO_INTEGER[mode].format(_float(t, operands[0], source, modifiers))
        width = t.width(i.operands[0], types.bits(to)) // 8
        view, result = f"u{width}", t.call(floats.to_integer, rounded, repr(to), width)
    else:
        known |= {"rn", "sat"}
        view, result = _between_floats(t, _float(t, operands[0], source, modifiers), source, to, modifiers)
    if modifiers - known:
        raise Unknown(f"modifiers {modifiers}")
    t.write(i.operands[0], view, result)


def _narrowed(t: Translator, operand: Operand, kind: str) -> str:
    """The low bits of a register as an integer of that type."""
    size = types.bits(kind)
    width = t.width(operand, size)
    if width == size:
        return t.read_array(operand, types.view(kind))
    return f"{t.read_array(operand, f'u{width // 8}')}.astype(u{size // 8}).view({types.view(kind)})"


def _fitting(t: Translator, i: Instruction, expression: str, kind: str) -> tuple[str, str]:
    """(view, expression) of an integer in a register that may be wider: extended by the sign of its type."""
    width = t.width(i.operands[0], types.bits(kind))
    view = f"{types.view(kind)[0]}{width // 8}"
    return view, expression if width == types.bits(kind) else f"{expression}.astype({view})"


def _float(t: Translator, operand: Operand, kind: str, modifiers: set[str]) -> str:
    if kind in FROM_16:
        return t.call(FROM_16[kind], t.read_array(operand, "u2"))
    x = t.read_array(operand, types.view(kind))
    return t.call(floats.flush, x) if "ftz" in modifiers else x


def _from_integer(t: Translator, integer: str, to: str) -> tuple[str, str]:
    if to == "bf16":
        return "u2", t.call(floats.integer_to_bf16, integer)
    if to == "f16":
        return "u2", f"{integer}.astype(f8).astype(f2).view(u2)"
    return types.view(to), f"{integer}.astype({types.view(to)})"


def _between_floats(t: Translator, x: str, source: str, to: str, modifiers: set[str]) -> tuple[str, str]:
    if rounding := modifiers & set(ROUND_TO_INTEGER):
        x = ROUND_TO_INTEGER[rounding.pop()].format(x)
    if "sat" in modifiers:
        x = t.call(floats.saturate, x)
    if to in TO_16:
        if source == "f64":
            raise Unknown("a 16-bit float of a float64")
        return "u2", t.call(TO_16[to], x)
    return types.view(to), x if (source, to) in (("f32", "f32"), ("f64", "f64")) else f"{x}.astype({types.view(to)})"
