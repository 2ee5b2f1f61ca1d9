"""The command ``export``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from partitions.common.errors import UserError


def add_commands(commands: Any) -> None:
    """Add this group to ``silofl``."""
    add_export(commands)


def add_export(commands: Any) -> None:
    """``export``."""
    p = commands.add_parser(
        "export",
        help="save a silo's model, or the shared one, as safetensors",
        description="Save one model of a run with its card, which says which it is. best and last are the silo's "
        "personal model: the best on its validation data (the default), or the last. reported is the silo's model "
        "whose score the report prints. shared is the one model of all silos, from the server's run directory.",
    )
    p.add_argument("source", metavar="RUN|STATE_DIR", help="a run directory, or a silo's state directory")
    p.add_argument("--silo", metavar="NAME", default="", help="for example hospital-03; not for --which shared")
    p.add_argument(
        "--which",
        choices=("best", "last", "reported", "shared"),
        default="best",
        help="which model, as above (default: best)",
    )
    p.add_argument(
        "--round", metavar="R", type=int, help="reported or shared: the round that the report names, if it is asked for"
    )
    p.add_argument("--strategy", metavar="A", help="which method, where the run has several")
    p.add_argument("--seed", metavar="S", type=int, help="which seed, where the run has several")
    p.add_argument("--run-id", metavar="ID", default="", help="which of several runs that had the same name")
    p.add_argument(
        "--temperature",
        metavar="DATA",
        type=Path,
        help="the silo's data file: scale the model's probabilities by one number, fitted on its validation "
        "part, which predict then uses; not for --which shared",
    )
    p.add_argument(
        "--conformal",
        metavar="DATA",
        type=Path,
        help="the silo's data file: its test part says how wide a set of classes, or an interval, has to be, which "
        "predict then adds; not for --which shared",
    )
    p.add_argument(
        "--coverage", metavar="SHARE", type=float, default=0.9, help="--conformal: how often it holds (default: 0.9)"
    )
    p.add_argument("--out", metavar="FILE", required=True, help="the .safetensors file; its card is FILE.json")
    p.add_argument("--no-recipe", action="store_true", help="leave the recipe of the silo's data out of the card")
    p.set_defaults(run=export)


def export(args: argparse.Namespace) -> None:
    from client.evidence.conformal import in_words
    from client.export import export_model
    from client.tables.new_samples import disclosed
    from partitions.recipes.pictures import parse_any

    source, out = Path(args.source), Path(args.out)
    if args.which == "shared":
        from server.results.shared_model import export_shared

        if args.silo or args.run_id or args.no_recipe or args.temperature or args.conformal:
            left = "--silo, --run-id, --no-recipe, --temperature and --conformal"
            raise UserError(f"--which shared: leave {left} out: it is of all silos")
        card = export_shared(source, out, args.strategy, args.seed, args.round)
    elif not args.silo:
        raise UserError(f"--which {args.which}: --silo NAME is wanted here")
    else:
        which = args.silo, args.which, out, args.strategy, args.seed, args.run_id, args.round
        own = {"temperature": args.temperature, "conformal": args.conformal, "coverage": args.coverage}
        card = export_model(source, *which, recipe=not args.no_recipe, **own)
    whose = f"model of {card['silo']}" if card["silo"] else "model of all silos"
    if scaled := card.get("temperature"):
        print(
            f"temperature {scaled['T']:.3f} from {scaled['samples']} validation samples: their loss was "
            f"{scaled['loss_before']:.4f} and is {scaled['loss_after']:.4f}"
        )
    if known := card.get("conformal"):
        print(in_words(known))
        if not known["as_trained"]:
            print("note: the run had other numbers of samples: no test sample of this file may have trained the model")
    print(f"{out}: {card['method']}, seed {card['seed']}, {args.which} {whose}: {card['when']}")
    if card.get("recipe"):
        print(f"note: {disclosed(parse_any(card['recipe']))}")
