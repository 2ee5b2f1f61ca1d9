"""HTTP server of ``silofl predict --serve``: JSON rows, or a picture or scan, in; JSON rows out.

``POST /predict`` accepts ``{"rows": [...]}`` (``client/prediction/posted.py``), or with a recipe of pictures one
file or a zip (``client/prediction/posted.py``). ``GET /`` describes the model's input.
Access control is that of ``silofl watch`` (``server/watch/access.py``). Requests are answered one after another. No
request, answer or refusal is stored or logged.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import IO, Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from client.export import read_model
from client.exporting.model_card import Card
from client.prediction.new_samples import recipe_of
from client.prediction.posted import (
    MOST_BYTES,
    MOST_FILES,
    MOST_ROWS,
    MOST_SCAN_BYTES,
    predict_rows,
    predict_scans,
    work_folder,
)
from client.prediction.predict import uncertainty
from models.flat import FlatModel
from partitions.common.errors import DataError, UserError
from partitions.common.memory import is_out_of_memory
from partitions.recipes.pictures import AnyRecipe, PictureRecipe, load_any
from partitions.recipes.recipe import Recipe
from server.watch.access import Guard, Token
from server.watch.serve import listen, serve_app

SCANS = ("application/dicom", "application/zip", "application/gzip", "application/octet-stream")
HINT = "send the header Authorization: Bearer TOKEN; silofl predict --serve printed it, or keeps it in its --token-file"


def serve_model(
    model: Path, recipe: Path | None, host: str, port: int, token: Token, network: str
) -> None:
    """Serve a model until Ctrl-C. Raises UserError if it cannot be read or has no recipe."""
    card, net = read_model(model, network)
    try:
        used = load_any(recipe) if recipe else recipe_of(card)
    except DataError as error:
        raise UserError(str(error)) from None
    with listen(host, port) as listening:
        serve_app(prediction_app(card, net, used, token.text), listening, host, token)


async def of_rows(request: Request, card: Card, net: FlatModel, used: Recipe) -> Response:
    """Answer a request with rows of a table."""
    if kind_of(request) != "application/json":
        return fault("the request has no Content-Type: application/json", 415)
    body = io.BytesIO()  # a table's rows are never written to a file
    if not await receive(request, body, MOST_BYTES):
        return fault(
            f"the request has more than {MOST_BYTES} bytes; send fewer rows at once", 413
        )
    as_gaps = request.query_params.get("as-gaps") == "1"
    return JSONResponse(predict_rows(card, net, used, body.getvalue(), as_gaps))


async def of_scans(
    request: Request, card: Card, net: FlatModel, used: PictureRecipe
) -> Response:
    """Answer a request with a picture, a scan, or a zip of one."""
    # A form of another site cannot send these types
    if not kind_of(request).startswith(("image/", *SCANS)):
        return fault(
            f"the request has no Content-Type of a picture or scan: image/png, {', '.join(SCANS)}",
            415,
        )
    with work_folder() as folder:
        with (folder / "body").open("xb") as file:
            whole = await receive(request, file, MOST_SCAN_BYTES)
        if not whole:
            return fault(
                f"the request has more than {MOST_SCAN_BYTES} bytes; send less at once", 413
            )
        return JSONResponse(
            predict_scans(card, net, used, folder / "body", request.query_params.get("key", ""))
        )


def prediction_app(card: Card, net: FlatModel, recipe: AnyRecipe, token: str = "") -> Starlette:
    """Return the ASGI application. ``token``: required from clients; empty: only loopback names are answered."""

    async def about(request: Request) -> Response:
        what = {
            "method": card.method,
            "silo": card.silo,
            "task": card.task,
            "round": card.round,
        }
        return JSONResponse({"model": what, **taken_by(recipe), "answers": uncertainty(card)})

    async def predict(request: Request) -> Response:
        try:
            return await (
                of_rows(request, card, net, recipe)
                if isinstance(recipe, Recipe)
                else of_scans(request, card, net, recipe)
            )
        except UserError as error:
            return fault(str(error), 422)
        except ClientDisconnect:
            return fault("the request was cut short", 400)
        # Its text may contain a patient's value, so only the type is printed
        except Exception as error:
            if is_out_of_memory(error):
                print("out of memory: a request is not answered", file=sys.stderr, flush=True)
                return fault("out of memory: send less at once", 503)
            print(
                f"a fault of silofl: {type(error).__name__}; please report it",
                file=sys.stderr,
                flush=True,
            )
            return fault("a fault of silofl; the request is not answered", 500)

    routes = [Route("/", about), Route("/predict", predict, methods=["POST"])]
    return Starlette(routes=routes, middleware=[Middleware(Guard, token=token, hint=HINT)])


def kind_of(request: Request) -> str:
    """Return the media type of a request's body."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def taken_by(recipe: AnyRecipe) -> dict[str, Any]:
    """Return the description of a request's allowed content."""
    if isinstance(recipe, Recipe):
        columns = [
            {"name": c.origin, "kind": c.kind, "categories": list(c.levels)}
            for c in recipe.used
        ]
        roles = [name for name in (recipe.patient, recipe.text.column) if name]
        return {
            "columns": columns,
            "also": roles,
            "limits": {"rows": MOST_ROWS, "bytes": MOST_BYTES},
        }
    parts = {key: recipe.content[key] for key in ("pictures", "expected")}
    return {**parts, "limits": {"files": MOST_FILES, "bytes": MOST_SCAN_BYTES}}


async def receive(request: Request, file: IO[bytes], most: int) -> bool:
    """Write the body to a file; return False if it is too long, without reading the rest."""
    size = 0
    async for part in request.stream():
        if (size := size + len(part)) > most:
            return False
        file.write(part)
    return True


def fault(why: str, status: int) -> Response:
    return JSONResponse({"error": why}, status)
