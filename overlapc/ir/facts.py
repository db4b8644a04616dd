"""Truth values of conditions that follow from other conditions, for the branches of a `where`."""

from __future__ import annotations

from collections.abc import Mapping

from overlapc.ir.body import Body, Checked, Load, Op, Reduce, Scan, Value, op

_OPPOSITE = {"lt": "ge", "ge": "lt", "le": "gt", "gt": "le"}


def learn(condition: Value, holds: bool, facts: dict[Value, bool]) -> None:
    """Add to `facts` everything that follows from the truth of `condition`: on itself, its parts and its opposite."""
    facts[condition] = holds
    if not isinstance(condition, Op):
        return
    if condition.name in _OPPOSITE and not condition.args[0].dtype.is_floating_point:  # a NaN is neither
        facts[op(_OPPOSITE[condition.name], *condition.args)] = not holds
    elif condition.name == "logical_not":
        learn(condition.args[0], not holds, facts)
    elif condition.name == "logical_and" and holds:
        for part in condition.args:
            learn(part, True, facts)
    elif condition.name == "logical_or" and not holds:
        for part in condition.args:
            learn(part, False, facts)


def known_truth(condition: Value, facts: Mapping[Value, bool]) -> bool | None:
    """Return the truth of a condition according to `facts`; None if they do not decide it."""
    if condition in facts:
        return facts[condition]
    if isinstance(condition, Op) and condition.name == "logical_and":
        parts = [known_truth(part, facts) for part in condition.args]
        return False if False in parts else None if None in parts else True
    return None


def unseen_where_masked(body: Body) -> frozenset[Load]:
    """Return the masked loads whose value is used only where their mask is true; a `where` replaces it elsewhere."""
    masked = [load for load in body.loads() if load.mask is not None]
    if not masked:
        return frozenset()
    known: dict[Value, frozenset[tuple[Value, bool]]] = {}  # facts that hold wherever the value is used

    def used(value: Value, facts: frozenset[tuple[Value, bool]]) -> None:
        known[value] = known[value] & facts if value in known else facts

    nothing: frozenset[tuple[Value, bool]] = frozenset()
    for store in body.stores:
        for operand in store.operands():
            used(operand, nothing)
    for value in reversed(body.values()):  # users before operands
        if isinstance(value, Op) and value.name == "where":
            used(value.args[0], known[value])
            for branch, holds in ((value.args[1], True), (value.args[2], False)):
                facts: dict[Value, bool] = {}
                learn(value.args[0], holds, facts)
                used(branch, known[value] | frozenset(facts.items()))
        else:
            # Addresses, reduced values and checked values are used whichever branch is selected.
            passed = nothing if isinstance(value, Load | Reduce | Scan | Checked) else known[value]
            for operand in value.operands():
                used(operand, passed)
    return frozenset(load for load in masked if load.mask is not None and known_truth(load.mask, dict(known[load])))
