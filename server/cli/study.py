"""Commands of a study: ``study new``, ``study check``, ``study sign``, ``study show``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from client.commands.table import Command, choice, file_option, flag, option, several
from partitions.common.errors import UserError
from server.cli.options import (
    FEDERATION,
    RUN_OPTIONS,
    SIGN_WITH,
    WHOSE,
    federation_of,
    run_values,
)

TEXTS = {
    "purpose": "the question, for a research committee",
    "contact": "who answers for the study",
    "results": "who may see the results",
    "retention": "who keeps what, and how long",
}


def new(args: argparse.Namespace) -> None:
    from partitions.common.files import write_atomically
    from partitions.schema import NO_SCHEMA, load_schema
    from server.deploy.study_draft import app_sums, draft, known_datasets, known_peers
    from server.results.reply_sizes import declared_data

    if args.file.exists() and not args.overwrite:
        raise UserError(f"{args.file} is there already: --overwrite replaces it")
    values, stated, schema, held_out = run_values(args), {}, NO_SCHEMA, args.held_out
    agreed = ""
    peers, datasets = dict[str, str](), dict[str, str]()
    # Its runs have the settings, the schema and the roles that the file states
    if args.federation != str(FEDERATION) or FEDERATION.is_file():
        federation = federation_of(args.federation)
        stated, schema, agreed = federation.settings, federation.declared, federation.agreed
        peers, datasets = known_peers(federation), known_datasets(federation)
        held_out = held_out or federation.held_out(values.get("strategy"))
    schema = load_schema(args.schema) if args.schema else schema
    texts = {key: getattr(args, key) for key in TEXTS}
    text = draft(
        args.name,
        {**stated, **values},
        texts=texts,
        end=args.end,
        apps=args.sum or app_sums(args.app),
        bytes_=args.bytes,
        schema=schema.digest if schema.content else "",
        data=declared_data(agreed, schema),
        held_out=held_out,
        peers=peers | pairs("--peer", args.peer),
        datasets=datasets | pairs("--own-dataset", args.own_dataset),
        analysis=asked_analysis(args),
    )
    write_atomically(args.file, text)
    empty = [key for key, text_of in texts.items() if not text_of]
    if empty:
        print(f"write {', '.join(empty)} into it")
    print(f"then: silofl study check {args.file}; silofl study sign {args.file}")
    print(args.file)


def asked_analysis(args: argparse.Namespace) -> dict[str, object]:
    """Return what the options say of [analysis]; empty without any. Raises UserError for an unreadable plan."""
    from server.planning.plan import planned_analysis

    if not (args.primary or args.effect or args.harm or args.plan):
        return {}
    return {
        "method": args.primary,
        "baseline": args.baseline,
        "effect": args.effect,
        "harm": args.harm,
        "estimand": args.estimand,
        "plan": planned_analysis(args.plan) if args.plan else {},
    }


def pairs(option: str, texts: Sequence[str]) -> dict[str, str]:
    """Return the values of `--peer SILO=FINGERPRINT` and `--own-dataset SILO=SHA256`, by silo. Raises UserError."""
    by_silo = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise UserError(
                f"{option} {text}: write SILO=SHA256:..., the fingerprint of its key"
                if option == "--peer"
                else f"{option} {text}: write SILO=SHA256, as its check-data prints it"
            )
        by_silo[name] = value
    return by_silo


def check_command(args: argparse.Namespace) -> None:
    from client.protocol.envelope import signer_of
    from client.studies import read_study
    from server.deploy.study_draft import check_study

    text, _ = read_study(args.file)
    study = check_study(text, str(args.file))
    signer = signer_of(text)
    print(
        f"ok    {study.name}: complete, and {', '.join(study.methods)} can run with these settings"
    )
    print(
        f"ok    signed by {signer}"
        if signer
        else f"note  not signed: silofl study sign {args.file}"
    )


def sign(args: argparse.Namespace) -> None:
    from client.protocol.envelope import sign_study, signer_of
    from client.protocol.keys import load_signing_key
    from client.studies import read_study
    from partitions.common.files import write_atomically
    from server.deploy.bundle import signing_key_file
    from server.deploy.study_draft import check_study

    text, _ = read_study(args.file)
    check_study(text, str(args.file))
    file = args.sign_with or signing_key_file(federation_of(args.federation))
    text = sign_study(text, load_signing_key(file))
    write_atomically(args.file, text)
    print(f"signed by {signer_of(text)}")


def show_command(args: argparse.Namespace) -> None:
    from client.protocol.envelope import signer_of
    from client.studies import read_study, study_page

    text, study = read_study(args.file)
    print(study_page(study, signer_of(text)))


def dpia(args: argparse.Namespace) -> None:
    from client.protocol.envelope import signer_of
    from client.protocol.study import StudyLimits
    from client.studies import known_dangers, leaves, noise_text, read_study
    from partitions.common.files import write_atomically
    from server.rendering import fill

    if args.out.exists():
        raise UserError(f"{args.out} is there already: remove it, or give --out another name")
    text, study = read_study(args.file)
    page = fill(
        "deploy/dpia.md",
        study=study,
        signer=signer_of(text),
        today=date.today(),
        masked=study.settings.get("secure-aggregation") is True,
        leaves=[*leaves(study)],
        limits=StudyLimits.model_fields,
        risks=known_dangers(study),
        noise=noise_text(study),
    )
    write_atomically(args.out, page)
    print(f"{args.out}: {page.count('**TO DO**')} places are the hospital's to fill in")


ACTIONS = (
    Command(
        "new",
        "write a study's draft from a run's settings",
        new,
        (
            file_option("file", "FILE", "the file to write, study.toml"),
            option("--name", "NAME", "the study's name", required=True),
            *(option(f"--{key}", "TEXT", help, default="") for key, help in TEXTS.items()),
            option(
                "--end",
                "YYYY-MM-DD",
                "its last day (default: in a year)",
                type=date.fromisoformat,
            ),
            file_option(
                "--app",
                "DIR",
                "the checkout whose app runs (default: this directory)",
                default=Path(),
            ),
            several("--sum", "SHA256", "or the sum of an app's build"),
            WHOSE,
            file_option(
                "--schema", "FILE", "the schema: no run has another (default: the federation's)"
            ),
            several(
                "--held-out",
                "SILO",
                "a hospital that does not train (default: the federation's)",
            ),
            several(
                "--peer",
                "SILO=FINGERPRINT",
                "the key of a hospital, for secure-aggregation (default: those registered from here)",
            ),
            several(
                "--own-dataset",
                "SILO=SHA256",
                "the source of a hospital's own data set (default: those of the federation file)",
            ),
            option(
                "--bytes",
                "N",
                "bytes that leave a hospital (default: by the network's size, of `agreed`)",
                type=int,
            ),
            option("--primary", "METHOD", "[analysis]: the method that is tested", default=""),
            option("--baseline", "METHOD", "[analysis]: over which", default="fedavg"),
            option(
                "--effect",
                "POINTS",
                "[analysis]: the smallest mean gain worth having, in hundredths of the metric",
                type=float,
            ),
            option(
                "--harm",
                "POINTS",
                "[analysis]: a hospital's loss that is harm, in hundredths of the metric",
                type=float,
            ),
            choice(
                "--estimand",
                ("hospital", "patient"),
                "[analysis]: the mean over hospitals, or over patients",
                "hospital",
            ),
            file_option("--plan", "DIR", "[analysis]: effect and metric of silofl plan --out"),
            flag("--overwrite", "replace FILE"),
            *RUN_OPTIONS,
        ),
        examples=(
            "silofl study new study.toml --name sepsis --strategy apple --rounds 15",
            "silofl study new study.toml --name sepsis --strategy fedavg,ditto --primary ditto --effect 3 --harm 10",
        ),
    ),
    Command(
        "check",
        "is a study complete, can it run, and who signed it?",
        check_command,
        (file_option("file", "FILE", "the study"),),
        examples=("silofl study check study.toml",),
    ),
    Command(
        "sign",
        "sign a study with the consortium's key",
        sign,
        (file_option("file", "FILE", "the study"), WHOSE, SIGN_WITH),
        examples=("silofl study sign study.toml",),
        description="Sign a study in place. A change after that is found, and wants a new signature.",
    ),
    Command(
        "show",
        "a study in words: what leaves, what can be inferred, how much at most",
        show_command,
        (file_option("file", "FILE", "the study"),),
        examples=("silofl study show study.toml",),
    ),
    Command(
        "dpia",
        "the draft of a data protection impact assessment, filled from a study",
        dpia,
        (
            file_option("file", "FILE", "the study"),
            file_option("--out", "FILE.md", "the draft", default=Path("dpia.md")),
        ),
        examples=("silofl study dpia study.toml --out dpia.md",),
        description="Write what Article 35(7) of the GDPR asks for, as far as the study tells; what is the hospital's "
        "to say is marked TO DO.",
    ),
)

COMMANDS = (
    Command(
        "study",
        "write, check, sign or show a study that hospitals approve",
        actions=ACTIONS,
        description="A study says what hospitals approve: question, methods, settings, software, limits, "
        "dates. A hospital approves it with silofl approve; a run belongs to it by --set "
        "study=NAME.",
    ),
)
