"""Why a distributed run differs: each cause is named only after something has confirmed it.

What the runs recorded settles some (other samples, other learning rates, ranks that hold different
weights); for the others the training runs again, alone and distributed, without what is suspected,
and the difference must disappear.
"""

from __future__ import annotations

import math

from allhands.errors import AllhandsError
from allhands.verify.noise import Difference, judge
from allhands.verify.probes import listed
from allhands.verify.runs import Case
from allhands.verify.traces import Trace, Variation


def explain(case: Case) -> list[str]:
    """The causes of a difference, as sentences, the most telling first."""
    data = _samples(case)
    found = _learning_rate(case) + case.runs.causes(case) + data
    if not data:
        # With other samples everything after them differs too, and no experiment would tell
        # anything.
        found += _ranks(case) + _experiments(case)
    found += _alone(case)
    if case.trace.failure and not any(step["apart"]["parameters"] for step in case.trace.steps):
        found.append(f"the training itself stopped there: {case.trace.failure}")
    return found or [_nothing_confirmed(case)]


def _learning_rate(case: Case) -> list[str]:
    for number, (step, other) in enumerate(
        zip(case.trace.steps, case.reference.steps, strict=False)
    ):
        for ours, theirs in zip(step["rates"], other["rates"], strict=True):
            if abs(ours - theirs) > 1e-12 * abs(theirs):
                return [
                    f"learning rate: {case.trace.step_name(number)} is taken with {ours:.6g} by "
                    f"{case.them}, and with {theirs:.6g} alone. The scheduler (or code that sets "
                    "the rate) depends on the number of workers; it must advance once an optimizer "
                    "step or epoch, whatever the world"
                ]
    return []


def _samples(case: Case) -> list[str]:
    number = case.finding.step - 1
    if case.finding.what not in ("number of samples", "samples", "number of optimizer steps"):
        return []
    orders = sorted(
        name
        for name in case.trace.orders.keys() & case.reference.orders.keys()
        if case.trace.orders[name] != case.reference.orders[name]
    )
    said = []
    if case.finding.what == "number of optimizer steps":
        said.append(
            f"{case.them} took {len(case.trace.steps)} optimizer steps, and one process "
            f"{len(case.reference.steps)}"
        )
    elif case.finding.what == "number of samples":
        ours, theirs = case.trace.steps[number]["samples"], case.reference.steps[number]["samples"]
        shares = ", ".join(map(str, case.trace.steps[number]["shares"]))
        how = "repeated, as padding of the last batch does" if ours > theirs else "left out"
        how = "" if case.runs.subject.own_batches else f": some are {how}"
        said.append(
            f"samples: {case.trace.step_name(number)} trains {case.them} on {ours} samples (by "
            f"rank: {shares}), and alone on {theirs}{how}"
        )
    if orders:
        loader, _, epoch = orders[0].rpartition("/")
        said.append(
            f"sampler: the order of loader '{loader}' in epoch {int(epoch) + 1} is another one "
            f"with {case.them} than alone. Its sampler depends on the rank or on the world; it "
            "must give the order of the whole epoch, which allhands deals out"
        )
    elif not said:
        if case.runs.probe.random_data:
            said.append(f"random data: {case.runs.probe.random_data}")
        else:
            said.append(
                f"samples: the order is the same, but in {case.trace.step_name(number)} "
                f"{case.them} train on other samples of it than one process"
            )
    return said


def _ranks(case: Case) -> list[str]:
    said = []
    total = case.runs.subject.parameters
    for kind in ("parameters", "buffers"):
        number = next((n for n, step in enumerate(case.trace.steps) if step["apart"][kind]), None)
        if number is None:
            continue
        names = case.trace.steps[number]["apart"][kind]
        step = case.trace.step_name(number)
        if kind == "buffers":
            said.append(
                f"buffers: after {step} and the state's sync_buffers() the ranks hold different "
                f"values of {listed(names)}; what is evaluated and saved depends on the rank"
            )
            continue
        where = (
            f"the ranks hold different weights after {step}, in {len(names)} of {total} parameters"
        )
        if case.trace.unwrapped:
            said.append(
                f"unwrapped module: {where}, and the module that the strategy made to exchange "
                "gradients was never called. The forward pass calls model.module, or an inner "
                f"module or method; call the module itself in {case.runs.subject.calls}"
            )
        else:
            said.append(
                f"not exchanged: {where}: {listed(names)}. Their gradients were not exchanged, or "
                "they were changed in a way that is not the same on every rank"
            )
    return said


# ---------------------------------------------------------------------- experiments


def _experiments(case: Case) -> list[str]:
    """Train again without what is suspected; what makes the difference disappear is a cause."""
    suspects = {kind: names for kind, names in case.runs.subject.modules.items() if names}
    # Two steps more than it took to see it.
    steps = min(case.steps, case.number + 2)
    wanted = {kind: Variation(steps, frozen=kind) for kind in suspects}
    if len(suspects) > 1 or case.runs.probe.draws:
        wanted["all"] = Variation(steps, frozen="all")
    if _first_uneven(case):
        wanted["drop_last"] = Variation(steps, drop_last=True)
    gone = _disappears_with(case, wanted)
    said = []
    if "batchnorm" in gone:
        said.append(
            f"BatchNorm: with {listed(suspects['batchnorm'])} in evaluation mode the difference "
            "disappears. Each worker normalises with the statistics of its own micro-batch, as "
            "every data-parallel training with BatchNorm does. GroupNorm or LayerNorm do not "
            "depend on the batch; DDP(sync_batchnorm=True) computes the statistics over all "
            "workers, on GPUs"
        )
    if "dropout" in gone:
        said.append(
            f"dropout: with {listed(suspects['dropout'])} off the difference disappears. Each rank "
            "draws its own masks, so another number of workers means other masks; that is no "
            "fault. Verify with p=0 to see everything else"
        )
    if not said and "all" in gone:
        if len(suspects) > 1:
            both = "BatchNorm and dropout together"
        else:
            both = "the model draws random numbers in its forward pass"
        said.append(
            f"training mode: {both}; with the whole model in evaluation mode the difference "
            "disappears. Each rank draws its own random numbers, and has its own batch statistics"
        )
    if "drop_last" in gone:
        shares = ", ".join(map(str, case.trace.steps[case.finding.step - 1]["shares"]))
        said.append(
            f"uneven shares: {case.trace.step_name(case.finding.step - 1)} is the first in which "
            f"the ranks have different numbers of samples ({shares}), and with drop_last=True, "
            "which leaves such steps out, the difference disappears. Something averages over "
            "ranks and not over samples"
        )
    return said


def _first_uneven(case: Case) -> bool:
    uneven = [len(set(step["shares"])) > 1 for step in case.trace.steps[: case.finding.step]]
    return len(uneven) == case.finding.step and uneven[-1] and not any(uneven[:-1])


def _disappears_with(case: Case, wanted: dict[str, Variation]) -> list[str]:
    """The variations under which alone and distributed are the same."""
    references: dict[str, tuple[str, Trace]] = {}
    try:
        for name, variation in wanted.items():
            alone = Variation(
                **(vars(variation) | {"alone_for": case.strategy.shares(case.workers)})
            )
            try:
                references[name] = case.runs.reference(alone)
            except AllhandsError:
                continue  # the changed training does not run, which confirms nothing
        if not references:
            return []
        tried = [(wanted[name], path) for name, (path, _) in references.items()]
        traces = case.runs.distributed(case.strategy, case.workers, tried)
        return [
            name
            for (name, (_, reference)), trace in zip(references.items(), traces, strict=True)
            if judge(trace, reference, case.noise, case.exact) is None and not trace.failure
        ]
    except AllhandsError:
        return []
    finally:
        for path, _ in references.values():
            case.runs.forget(path)


# ---------------------------------------------------------------------- what one process shows


_CHANGED = {
    "reversed": "takes the samples of each global batch in reverse order",
    "cut": "cuts each global batch into smaller micro-batches",
}


def _alone(case: Case) -> list[str]:
    said = []
    found = case.refused.get("repeated")
    if found is not None:
        said.append(
            "not repeatable: one process that simply trains again differs too, in step "
            f"{found.step} ({_measured(found)}). The training draws random numbers that its seed "
            "does not decide, or keeps a state outside its objects"
        )
    for name, text in _CHANGED.items():
        found = case.refused.get(name)
        if found is not None:
            said.append(
                f"not the strategy alone: one process that {text} differs too, in step "
                f"{found.step} ({_measured(found)})"
            )
            break
    if case.runs.probe.unregistered:
        said.append(
            f"unregistered: {listed(case.runs.probe.unregistered)} takes part in the loss without "
            "being a parameter of the model"
        )
    return said


def _nothing_confirmed(case: Case) -> str:
    finding = case.finding
    total = case.runs.subject.parameters
    where = (
        f"; in that step it is in {len(finding.names)} of {total} parameters: "
        f"{listed(finding.names)}"
        if finding.names
        else ""
    )
    return (
        f"no cause could be confirmed{where}. Samples, learning rates and the weights of all ranks "
        "agree up to there, the criterion is a mean over samples, and neither BatchNorm nor "
        "dropout explains it; look at what changes gradients between the backward pass and the "
        "optimizer (hooks, the strategy's exchange)"
    )


def _measured(finding: Difference) -> str:
    if math.isnan(finding.difference):
        return finding.what
    return f"{finding.what}: {finding.difference:.1e}"
