"""`datastreamer repair`: repair a damaged stream file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from datastreamer.cli.consent import Consent
from datastreamer.cli.shared.addresses import sources_of
from datastreamer.cli.shared.exit_codes import DamageFound, write_out
from datastreamer.cli.shared.options import FileArgument, ReportOutput, SourceOptions, text_option
from datastreamer.cli.shared.output import count, json_line, text_lines, wrapped
from datastreamer.cli.shared.progress import ProgressBar
from datastreamer.format import STREAM_TYPE_SEQUENCER
from datastreamer.printable import counted
from datastreamer.storage.maintain.repair import Repaired, Sources, plan
from datastreamer.storage.maintain.repair import repair as mend
from datastreamer.storage.maintain.repair_plan import Plan

FromOption = Annotated[
    list[str] | None,
    text_option(
        "HOST:PORT",
        "Restore damaged pages from this server of the same stream, or from archive:URL; may be "
        "repeated. A page that has no checksum is restored if two servers send the same bytes, and "
        "none other bytes.",
        name="--from",
    ),
]
TrustOption = Annotated[
    bool,
    typer.Option(
        "--trust-peer", help="Also restore pages without a checksum that only one server sends."
    ),
]
CutOption = Annotated[
    bool,
    typer.Option(
        "--cut",
        help="Truncate the stream before the first damaged page: the entries of that page and all "
        "later ones are removed. On a terminal it asks first; elsewhere it needs --yes.",
    ),
]


def repair(
    file: FileArgument,
    *,
    from_: FromOption = None,
    trust_peer: TrustOption = False,
    cut: CutOption = False,
    consent: Consent,
    output: ReportOutput,
    options: SourceOptions,
) -> None:
    """Repair a damaged stream file.

    Restores damaged pages from servers, and corrects header, totals, size and index. If no server
    restores a damaged page, the page remains: its entries cannot be read, all others can, and no
    number changes. If the end of the file is missing, truncates the stream before the missing
    entries, but not with --from. Exits with 3 in these cases, also with --dry-run. First copies
    the bytes that it changes to FILE.<time>.repair. Does not change a healthy file.

    Examples:
      datastreamer repair stream.bin --dry-run
      datastreamer repair stream.bin --from stream.example.org:6900
    """
    shape = output.chosen()
    if cut and from_:
        raise typer.BadParameter("--cut and --from exclude each other")
    if trust_peer and not from_:
        raise typer.BadParameter("--trust-peer requires --from")
    with (
        _servers(from_ or [], options, file, trust_peer=trust_peer) as sources,
        ProgressBar(f"checking {file}", 1) as bar,
    ):
        if cut and not (consent.dry_run or consent.yes):
            planned = plan(file, cut=True, progress=bar.reach)
            bar.close()
            if planned.entries_cut:
                consent.require(f"{file}: this permanently removes {_removed(planned)}")
        if consent.dry_run:
            made, done = plan(file, cut=cut, sources=sources, progress=bar.reach), None
        else:
            done = mend(file, cut=cut, sources=sources, progress=bar.reach)
            made = done.plan
    facts = _facts(made, done)
    write_out(json_line(facts) if shape == "jsonl" else _table(file, made, done))
    if losses := _losses(made, done, servers_named=bool(from_)):
        raise DamageFound(f"{file}: {'; '.join(losses)}")
    if done is not None and not done.report.ok:
        problem = done.report.problems[0]
        raise DamageFound(f"{file}: {problem.what}: {problem.repair}")


@contextlib.contextmanager
def _servers(
    named: list[str], options: SourceOptions, file: str, *, trust_peer: bool
) -> Iterator[Sources]:
    from datastreamer.client.server_peer import ServerPeer

    servers, archives = sources_of("--from", named)
    upstreams = options.upstreams(servers, " and ".join(named) or file)
    if options.stream_type is not None and not named:
        raise typer.BadParameter("--stream-type requires --from")
    kind = STREAM_TYPE_SEQUENCER if options.stream_type is None else options.stream_type
    with contextlib.ExitStack() as stack:
        peers = [stack.enter_context(ServerPeer(each, stream_type=kind)) for each in upstreams]
        yield Sources([*peers, *map(stack.enter_context, archives)], trust_peer)


def _facts(made: Plan, done: Repaired | None) -> dict[str, Any]:
    total = made.claimed if made.header is None else made.header.total_entries
    return {
        "changed": done is not None and bool(made.steps),
        "healthy": made.healthy if done is None else done.report.ok,
        "entries": total,
        "entries_cut": made.entries_cut,
        "cut": _cut(made),
        "entries_lost": made.entries_lost,
        "lost": [{"first": first, "last": stop - 1} for first, stop in made.lost],
        "pages": [
            {
                "page": it.page,
                "pages": it.end_page - it.page,
                "first": it.first,
                "last": it.stop - 1,
                "restored_from": it.source or None,
                "refused": it.why or None,
                "kept": it.kept or None,
            }
            for it in made.healed
        ],
        "steps": made.steps,
        "problems": made.report.as_dict()["problems"],
        "problems_left": None if done is None else done.report.as_dict()["problems"],
        "kept": None if done is None else done.kept,
    }


def _cut(made: Plan) -> dict[str, int] | None:
    """The first and the last of the entries that are truncated."""
    if made.header is None or not made.entries_cut:
        return None
    first = made.header.total_entries
    return {"first": first, "last": first + made.entries_cut - 1}


def _removed(made: Plan) -> str:
    cut = _cut(made) or {}
    return f"{counted(made.entries_cut)} ({_range(**cut)}), from the first damaged page on"


def _losses(made: Plan, done: Repaired | None, *, servers_named: bool) -> list[str]:
    """What is lost after the repair, and what restores it; empty if nothing is."""
    losses = [made.held] if made.held else []
    helps = "--from HOST:PORT restores them from a server of the same stream"
    if servers_named:
        helps = "no server named restored them, and the report says why"
        if not made.healed:
            helps = "no server named was asked: first stop the program that writes the file"
    if made.shortened and not made.held and (cut := _cut(made)):
        are = "would be" if done is None else "are"
        after = helps
        if done is not None and not servers_named:
            after = "replace the file by a copy that has them, or let their source write them again"
        losses.append(
            f"{counted(made.entries_cut)} ({_range(cut['first'], cut['last'])}) {are} lost: the "
            f"file lacks them; {after}"
        )
    if made.lost:
        losses.append(
            f"{counted(made.entries_lost)} cannot be read: {_ranges(made)}; {helps}; --cut "
            "truncates the stream before the first damaged page"
        )
    return losses


def _ranges(made: Plan) -> str:
    parts = [_range(first, stop - 1) for first, stop in made.lost[:5]]
    return ", ".join(parts) + (", ..." if len(made.lost) > 5 else "")


def _range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first} to {last}"


def _table(name: str, made: Plan, done: Repaired | None) -> bytes:
    if made.healthy:
        return text_lines([f"{name}: no problems; nothing was changed"])
    lines = [f"{name}: {count(len(made.report.problems), 'problem')}"]
    for problem in made.report.problems:
        lines += ["", f"{problem.where}:", *wrapped(problem.what)]
    lines += ["", "repair would do this (--dry-run: nothing was changed):"]
    if done is not None:
        lines[-1] = "repair did this:"
    nothing = "nothing" if made.held else "nothing: only damaged pages are left"
    for step in made.steps or [nothing]:
        first, *more = wrapped(step)
        lines += [f"- {first.strip()}", *more]
    for it in made.healed:
        if it.why:
            lines += ["", f"{it.described()}: refused answers:", *wrapped(it.why)]
    if made.held:
        lines += ["", "ATTENTION:", *wrapped(made.held)]
    if made.entries_cut:
        share = counted(made.entries_cut)
        would = "were" if done is not None else "would be"
        lines += ["", f"ATTENTION: {share} at the end of the stream {would} removed."]
    if made.lost:
        lines += [
            "",
            f"ATTENTION: {counted(made.entries_lost)} cannot be read: {_ranges(made)}.",
        ]
    if done is not None and done.kept is not None:
        lines += ["", f"the changed part was copied to {done.kept}"]
    lines += [f"the damaged bytes were copied to {it.kept}" for it in made.healed if it.kept]
    if done is not None:
        problems = done.report.problems
        verdict = count(len(problems), "problem") if problems else "no problems"
        lines += [f"checked again: {verdict}, {count(done.report.entries, 'entry')}"]
    return text_lines(lines)
