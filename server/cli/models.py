"""Commands on an exported model: ``export``, ``predict``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from client.commands import data
from partitions.common.errors import UserError

PORT = 8643  # default port of `predict --serve`


def add_commands(commands: Any) -> None:
    """Add the commands of this group to the parser."""
    add_export(commands)
    add_predict(commands)


def add_export(commands: Any) -> None:
    """Add the command ``export``."""
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
    p.add_argument(
        "--onnx",
        action="store_true",
        help="write FILE.onnx beside it, with scaling and temperature inside, checked by onnxruntime; not for --which "
        "shared",
    )
    p.add_argument("--out", metavar="FILE", required=True, help="the .safetensors file; its card is FILE.json")
    p.add_argument("--no-recipe", action="store_true", help="leave the recipe of the silo's data out of the card")
    p.set_defaults(run=export)


def add_predict(commands: Any) -> None:
    """Add the command ``predict``, with ``--serve``."""
    p = data.add_predict(commands)
    p.add_argument(
        "--serve",
        action="store_true",
        help="answer over HTTP until Ctrl-C, in place of --data: POST /predict takes JSON rows, or by a "
        "recipe of pictures one picture or scan, or a zip of a series",
    )
    p.add_argument("--port", metavar="P", type=int, default=PORT, help=f"--serve: 0 for a free one (default: {PORT})")
    p.add_argument(
        "--host",
        metavar="ADDRESS",
        default="127.0.0.1",
        help="--serve: another address than loopback's needs a token (default: 127.0.0.1)",
    )
    p.add_argument(
        "--token-file",
        metavar="FILE",
        type=Path,
        help="--serve: what a client has to know; made where it is missing. Without it, beyond loopback, a new one is "
        "printed",
    )
    p.set_defaults(run=predict)


def predict(args: argparse.Namespace) -> None:
    if not args.serve:
        if not args.data:
            raise UserError("--data FILE is missing: whom to predict; or --serve answers over HTTP")
        if args.token_file or args.host != "127.0.0.1" or args.port != PORT:
            raise UserError("--host, --port and --token-file belong to --serve")
        data.predict(args)
        return
    from server.serving.predictions import serve_model
    from server.watch.access import LOOPBACK, new_token, read_token

    if args.data or args.out or args.masks or args.as_gaps or args.key:
        raise UserError(
            "--serve: leave --data, --out, --masks, --key, --as-gaps out; requests may say ?as-gaps=1, ?key=study"
        )
    token = read_token(args.token_file) if args.token_file else ""
    token = token or ("" if args.host in LOOPBACK else new_token())
    serve_model(Path(args.model), args.recipe, args.host, args.port, token)


def export(args: argparse.Namespace) -> None:
    from client.evidence.conformal import in_words
    from client.export import export_model, onnx_file
    from client.tables.new_samples import disclosed
    from partitions.recipes.pictures import parse_any

    source, out = Path(args.source), Path(args.out)
    if args.which == "shared":
        from server.results.shared_model import export_shared

        if args.silo or args.run_id or args.no_recipe or args.temperature or args.conformal or args.onnx:
            left = "--silo, --run-id, --no-recipe, --temperature, --conformal and --onnx"
            raise UserError(f"--which shared: leave {left} out: it is of all silos")
        card = export_shared(source, out, args.strategy, args.seed, args.round)
    elif not args.silo:
        raise UserError(f"--which {args.which}: --silo NAME is needed here")
    else:
        which = args.silo, args.which, out, args.strategy, args.seed, args.run_id, args.round
        own = {
            "temperature": args.temperature,
            "conformal": args.conformal,
            "coverage": args.coverage,
            "onnx": args.onnx,
        }
        card = export_model(source, *which, recipe=not args.no_recipe, **own)
    whose = f"model of {card['silo']}" if card["silo"] else "model of all silos"
    scaled, known = card.get("temperature"), card.get("conformal")
    if scaled:
        print(
            f"temperature {scaled['T']:.3f} from {scaled['samples']} validation samples: their loss was "
            f"{scaled['loss_before']:.4f} and is {scaled['loss_after']:.4f}"
        )
    if known:
        print(in_words(known))
    if not all(own["as_trained"] for own in (scaled, known) if own):
        print(
            "note: the run divided the samples otherwise than this file (a simulation draws validation parts): what is "
            "computed here holds only if the model was not trained on the file's validation and test part"
        )
    if made := card.get("onnx"):
        print(f"{made['file']}: onnxruntime gives PyTorch's answers, to {made['apart']:.1g}")
    elif (older := onnx_file(out)) != out and older.exists():
        print(f"note: {older} was there before and is not of this model: remove it, or export again with --onnx")
    print(f"{out}: {card['method']}, seed {card['seed']}, {args.which} {whose}: {card['when']}")
    if card.get("recipe"):
        print(f"note: {disclosed(parse_any(card['recipe']))}")
