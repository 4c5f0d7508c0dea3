"""Answer requests with exported models, over HTTP: ``hotbed serve``."""

from __future__ import annotations

import math
import os
import re
from argparse import Namespace
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hotbed.cli.arguments import Parser, add_parameters
from hotbed.errors import RecipeError, StoppedError
from hotbed.locations import local, location
from hotbed.serve.options import ServeOptions

if TYPE_CHECKING:
    from hotbed.serve.server import Served

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
REDIS_VARIABLE = "HOTBED_REDIS"
_LONGEST_POLL_S = 86_400.0


def add_arguments(parser: Parser) -> None:
    """Add the models, where their rows are, and the server's options."""
    parser.usage = "hotbed serve DIR|URI [--model NAME=DIR|URI …] [options]"
    parser.add_argument(
        "place",
        nargs="?",
        help="Exported model (hotbed export), or directory that training publishes in (train.publish), which is "
        "followed; a path or URI.",
    )
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        help="NAME=DIR|URI: a model under a name; again for several, of which the first answers POST /score.",
    )
    parser.add_argument(
        "--memory_gib", type=float | None, help="Memory for rows of each model; default: all rows are in memory."
    )
    parser.add_argument(
        "--redis",
        help="Address of a Redis with rows in front of files: redis://…. With a password give it in the environment "
        f"variable {REDIS_VARIABLE}, as others see command lines.",
    )
    parser.add_argument("--directory", help="Where files for changed rows are made; default: that of temporary files.")
    parser.add_argument(
        "--cache",
        help="Where files of models at URIs are kept; default: hotbed/models in the user's folder for caches.",
    )
    parser.add_argument(
        "--encoded",
        type=bool,
        default=False,
        help="Requests have ids and numbers as hotbed prepare makes them, instead of raw values.",
    )
    parser.add_argument(
        "--verify", type=bool, default=True, help="Compare the hashes of all files of a model before it is served."
    )
    parser.add_argument(
        "--threads", type=int | None, help="Threads that compute the dense part of each model; default: torch's."
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda.")
    parser.add_argument("--poll_s", type=float, default=1.0, help="Seconds between looks for new versions.")
    add_parameters(parser, ServeOptions)


def run(parsed: Namespace) -> None:
    """Open the models, and answer until a signal says that it is enough."""
    values: dict[str, Any] = dict(vars(parsed))
    place, models, poll_s = (values.pop(name) for name in ("place", "model", "poll_s"))
    names = ("memory_gib", "redis", "directory", "verify", "threads", "device")
    rows = _row_options({name: values.pop(name) for name in names})
    rows |= {name: values.pop(name) for name in ("encoded", "cache")}
    if rows["cache"] is not None:
        rows["cache"] = local("--cache", rows["cache"])
        if rows["cache"].exists() and not rows["cache"].is_dir():
            raise RecipeError(f"--cache is {rows['cache']}, which is no directory; name another place")
    if not 0 < poll_s <= _LONGEST_POLL_S:
        raise RecipeError(f"--poll_s is {poll_s}, must be above 0 and at most {_LONGEST_POLL_S:,.0f}")
    options = ServeOptions(**values)
    token = options.token()
    named = _named(place, models)
    try:
        from hotbed.serve.logs import json_logs
        from hotbed.serve.redis_records import check_address
        from hotbed.serve.server import Served, Server, listen
    except ImportError as error:
        raise RecipeError(
            f"hotbed serve needs more libraries ({error}); pip install 'hotbed[serve]' installs them"
        ) from None

    if rows["redis"] is not None:
        check_address(rows["redis"])
    with listen(options) as taken, json_logs(), ExitStack() as opened:
        served = dict[str, Served]()
        for name, at in named.items():
            found = _opened(name, at, rows, poll_s, opened)
            if found.name in served:
                raise RecipeError(f"two models are called {found.name!r}; give both names with --model NAME=DIR")
            served[found.name] = found
        try:
            Server(list(served.values()), options, taken, token).run()
        except StoppedError:
            opened.pop_all()  # at once: nothing is waited for
            raise


def _row_options(given: dict[str, Any], environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Check the options of models and their rows, and return those of `ServedModel.open`."""
    found = dict(given)
    memory_gib, redis, folder = found.pop("memory_gib"), found["redis"], found["directory"]
    what = REDIS_VARIABLE if redis is None else "--redis"
    found["redis"] = environment.get(REDIS_VARIABLE) if redis is None else redis
    if memory_gib is not None and not 0 < memory_gib < math.inf:
        raise RecipeError(f"--memory_gib is {memory_gib}, must be above 0")
    if found["device"] not in ("cpu", "cuda"):
        raise RecipeError(f"--device is {found['device']!r}, must be cpu or cuda")
    if found["threads"] is not None and found["threads"] < 1:
        raise RecipeError(f"--threads is {found['threads']}, must be at least 1")
    if folder is not None and not Path(folder).is_dir():
        raise RecipeError(f"--directory is {folder}, which is no directory; make it first")
    if found["redis"] is not None and memory_gib is None:
        raise RecipeError(
            f"{what} is for rows in files, but without --memory_gib all rows are in memory; give --memory_gib, or "
            f"leave {what} out"
        )
    return {"memory_bytes": None if memory_gib is None else int(memory_gib * 2**30), **found}


def _path_name(name: str) -> str:
    """What a recipe's name is in paths, which have only letters, digits, '.', '_' and '-'."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip("._-")[:100] or "model"


def _opened(name: str | None, place: str, rows: Mapping[str, Any], poll_s: float, opened: ExitStack) -> Served:
    """Open a model, and follow its directory if that is one that training publishes in."""
    from hotbed.checkpoint.storage import directory
    from hotbed.serve.follower import Follower, open_newest
    from hotbed.serve.model_files import MANIFEST
    from hotbed.serve.server import Served

    at = directory(location(place))
    model = open_newest(at, **rows)
    opened.callback(model.close)
    called = name or _path_name(model.name or "")
    follower = None
    if not at.has(MANIFEST):
        follower = Follower(model, at, interval_s=poll_s, verify=rows["verify"], cache=rows["cache"])
        opened.callback(follower.close)
        follower.look()  # so that the first answer is by the newest version
        follower.start()
    return Served(called, model, follower)


def _named(place: str | None, models: list[str]) -> dict[str | None, str]:
    """Places by name; None is a model that says its name itself."""
    named: dict[str | None, str] = {} if place is None else {None: place}
    for model in models:
        name, _, at = model.partition("=")
        if not _NAME.fullmatch(name) or not at:
            raise RecipeError(f"--model is {model!r}, must be NAME=DIR, the name of letters, digits, '.', '_' and '-'")
        if name in named:
            raise RecipeError(f"--model names {name!r} twice; give each model its own name")
        named[name] = at
    if not named:
        raise RecipeError("there is no model to serve; name a directory that hotbed export made, or --model NAME=DIR")
    return named
