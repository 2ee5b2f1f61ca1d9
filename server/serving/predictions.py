"""The small HTTP server of ``silofl predict --serve``: JSON rows in, JSON rows out.

``POST /predict`` takes ``{"rows": [...]}`` (``client/prediction/json_rows.py``), ``GET /`` says what the model takes.
Who may ask: as for ``silofl watch`` (``server/watch/access.py``). Requests are answered one after another. No request,
answer or refusal is kept or logged.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from client.export import read_model
from client.prediction.json_rows import MOST_BYTES, MOST_ROWS, predict_rows
from client.prediction.predict import uncertainty
from client.tables.new_samples import recipe_of
from models.flat import FlatModel
from partitions.common.errors import DataError, UserError
from partitions.recipes.pictures import load_any
from partitions.recipes.recipe import Recipe
from server.watch.access import Guard
from server.watch.serve import listen, run

PORT = 8643
HINT = "send the header Authorization: Bearer TOKEN, with the token that silofl predict --serve has printed"


def serve_model(model: Path, recipe: Path | None, host: str, port: int, token: str) -> None:
    """Serve a model until Ctrl-C. Raises UserError where it cannot be read, or has no recipe of a table."""
    card, net = read_model(model)
    try:
        used = load_any(recipe) if recipe else recipe_of(card)
    except DataError as error:
        raise UserError(str(error)) from None
    if not isinstance(used, Recipe):
        raise UserError("--serve answers rows of a table; the recipe is of pictures or scans, which --data takes")
    with listen(host, port) as listening:
        run(application(card, net, used, token), listening, host, token)


def application(card: dict[str, Any], net: FlatModel, recipe: Recipe, token: str = "") -> Starlette:
    """Return the ASGI application. ``token``: what a client has to know; empty: loopback's names only are answered."""

    async def about(request: Request) -> Response:
        columns = [{"name": c.source or c.name, "kind": c.kind, "categories": list(c.levels)} for c in recipe.used]
        roles = [name for name in (recipe.patient, recipe.text) if name]
        what = {"method": card["method"], "silo": card["silo"], "task": card["task"], "round": card["round"]}
        limits = {"rows": MOST_ROWS, "bytes": MOST_BYTES}
        return JSONResponse(
            {"model": what, "columns": columns, "also": roles, "answers": uncertainty(card), "limits": limits}
        )

    async def predict(request: Request) -> Response:
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            return fault("the request has no Content-Type: application/json", 415)
        if (body := await body_of(request)) is None:
            return fault(f"the request has more than {MOST_BYTES} bytes; send fewer rows at once", 413)
        try:
            as_gaps = request.query_params.get("as-gaps") == "1"
            return JSONResponse(predict_rows(card, net, recipe, body, as_gaps))
        except UserError as error:
            return fault(str(error), 422)
        except Exception as error:  # its text may have a patient's cell
            print(f"a fault of silofl: {type(error).__name__}; please report it", file=sys.stderr, flush=True)
            return fault("a fault of silofl; the request is not answered", 500)

    routes = [Route("/", about), Route("/predict", predict, methods=["POST"])]
    return Starlette(routes=routes, middleware=[Middleware(Guard, token=token, hint=HINT)])


async def body_of(request: Request) -> bytes | None:
    """The body, or None where it is too long: then the rest of it is not read."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > MOST_BYTES:
            return None
    return body


def fault(why: str, status: int) -> Response:
    return JSONResponse({"error": why}, status)
