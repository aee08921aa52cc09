"""An in-memory conversion: each tensor of the result is computed when it is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .. import _core
from ..checkpoint.manifests import beside, run_options
from ..checkpoint.open_checkpoint import CheckpointSource
from ..checkpoint.planned_view import PlannedView
from ..common import memory_budget
from ..common.errors import Finding, from_core, raise_errors
from ..common.progress import Progress, Report
from ..findings.proof import list_unchecked
from .companion_files import along
from .convert import compared, planned

if TYPE_CHECKING:
    from pathlib import Path

    from ..checkpoint.checkpoint import Checkpoint
    from ..checkpoint.manifests import Expected
    from ..checkpoint.plan import Plan
    from ..common.options import StrPath

__all__ = ["View", "view"]


class View(PlannedView):
    """The tensors of a conversion, under the target's names; each is computed when it is read.

    ``fastshard.open(..., to=...)`` returns a view, after all checks that a conversion makes by headers.
    Copies of a tensor on several ranks are compared when it is read. :attr:`not_checked` lists the checks
    that need more than single tensors; :meth:`verify` makes them by reading everything once.

    Examples:
        >>> view = fastshard.open("run", to="hf", vocab_size=500)
        >>> view["gpt_neox.layers.0.attention.dense.weight"].numpy().shape
        (32, 32)
        >>> findings = view.verify()
        >>> view.verified
        True
    """

    def __init__(
        self, checkpoint: Checkpoint, plan: Plan, expected: Expected, companions: Mapping[str, Path | str]
    ) -> None:
        super().__init__(checkpoint, plan, companions)
        self._expected = expected
        self._found = list(plan.findings)
        self._verified = False

    @property
    def findings(self) -> list[Finding]:
        """Warnings and notes from planning and from :meth:`verify`."""
        return list(self._found)

    @property
    def verified(self) -> bool:
        """True once :meth:`verify` has read everything."""
        return self._verified

    @property
    def not_checked(self) -> list[str]:
        """Checks of the tensors that were not made, one line each; fewer lines after :meth:`verify`."""
        unread = [f"{line}; verify() checks it" for line in self.unread]
        return [*unread, *list_unchecked(self._found, with_advice=True)]

    @property
    def unread(self) -> list[str]:
        """Statements that can be verified only by reading all data, one line each; none after
        :meth:`verify`."""
        if self._verified:
            return []
        done = self.plan.summary["compared"]
        unread = [
            "whether a file or block is a copy of another one (FS303): only all files together show that"
        ]
        if done["checksums"]:
            unread.append(f"the checksums of {done['checksums']} members of the source's archives (FS301)")
        if done["twins"]:
            unread.append(f"whether {done['twins']} parameters are the rounded master weights (FS401)")
        if done["pads"]:
            unread.append(f"whether the rows cut off {done['pads']} tensors are padding")
        if (self._expected.manifest or beside(self.checkpoint)) is not None:
            unread.append("whether the contents match the manifest")
        return unread

    @memory_budget.kept
    def verify(
        self, *, memory: str | int | None = None, threads: int | None = None, progress: Report = False
    ) -> list[Finding]:
        """Reads all data once, in bounded memory, and performs every check of a conversion.

        Args:
            memory: as for :func:`fastshard.convert`.
            threads: as for :func:`fastshard.convert`.
            progress: as for :func:`fastshard.convert`.

        Returns:
            Warnings and notes.

        Raises:
            FastshardError: with all findings that would prevent a conversion.
        """
        run = run_options(memory, threads, self.checkpoint.opened.catalog, self.plan.core)
        with Progress(progress) as bar:
            found = compared(self._expected, self.checkpoint, self.plan, run, bar, (1, 1))
            try:
                found += self.plan.core.check(run, bar.phase("verifying"))[0]
            except _core.CoreError as error:
                raise from_core(error) from None
        self._found = self.checkpoint.opened.gate.passed([*self.plan.findings, *found])
        self._verified = True
        return self.findings

    def _below(self) -> str:
        return f"not checked: {'; '.join(self.not_checked)}"

    def __repr__(self) -> str:
        state = "verified" if self._verified else "not verified"
        return (
            f"<fastshard.View {self.checkpoint.framework} as {self.plan.target}: {len(self)} tensors, "
            f"{state}>"
        )


def view(
    source: CheckpointSource,
    to: str,
    expect: StrPath | Mapping[str, Any] | None,
    tokenizer: StrPath | None,
    options: Mapping[str, Any],
) -> View:
    """Open a conversion in memory; see :func:`fastshard.open`.

    Raises:
        FastshardError: with all findings that prevent a conversion.
    """
    expected, checkpoint, plan, words = planned(source, to, expect, tokenizer, options)
    raise_errors(plan.findings)
    return View(checkpoint, plan, expected, dict(along(plan, words, given=tokenizer is not None)))
