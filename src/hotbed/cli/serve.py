"""Serve exported models over HTTP: ``hotbed serve``."""

from __future__ import annotations

import os
import re
from argparse import Namespace
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from hotbed.checks import Count, Positive, Range
from hotbed.cli.arguments import Parser, add_parameters
from hotbed.errors import RecipeError, StoppedError
from hotbed.locations import local, location
from hotbed.serve.options import ServeOptions

if TYPE_CHECKING:
    from hotbed.serve.server import Served

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
REDIS_VARIABLE = "HOTBED_REDIS"


def add_arguments(parser: Parser) -> None:
    """Add the models, the options for storing their rows, and the server's options."""
    parser.usage = "hotbed serve DIR|URI [--model NAME=DIR|URI …] [options]"
    model = "Path or URI of an exported model (hotbed export), or of a directory to which training publishes models "
    parser.add_argument("place", nargs="?", help=f"{model}(train.publish). The newest of these models is served.")
    text = "Named model, e.g. clicks=DIR. Repeat this option for several models. The first model answers POST /score."
    parser.add_argument("--model", action="append", default=[], help=text)
    redis = "Address of a Redis server that caches rows of tables in files, e.g. redis://HOST. Set an address with a "
    redis += f"password in the environment variable {REDIS_VARIABLE}, because other users can see command lines."
    cache = "Directory for downloaded models (default: hotbed/models in the user's cache directory)."
    encoded = "Whether requests have ids and numbers as datasets of hotbed prepare do, instead of raw values."
    text = "Memory limit for the rows of each model (default: all rows)."
    parser.add_argument("--memory_gib", type=Positive | None, help=text)
    parser.add_argument("--redis", help=redis)
    parser.add_argument("--directory", help="Directory for files of changed rows (default: the temporary directory).")
    parser.add_argument("--cache", help=cache)
    parser.add_argument("--encoded", type=bool, default=False, help=encoded)
    parser.add_argument("--verify", type=bool, default=True, help="Whether to check the hashes of all files first.")
    text = "Number of threads for the dense part of each model (default: the default of torch)."
    parser.add_argument("--threads", type=Count | None, help=text)
    parser.add_argument("--device", type=Literal["cpu", "cuda"], default="cpu", help="Device.")
    seconds = Annotated[float, Range(above=0, most=86_400.0)]
    parser.add_argument("--poll_s", type=seconds, default=1.0, help="Seconds between checks for new versions.")
    add_parameters(parser, ServeOptions)


def run(parsed: Namespace) -> None:
    """Open the models, and serve them until a signal."""
    values: dict[str, Any] = dict(vars(parsed))
    source, models, poll_s = (values.pop(name) for name in ("place", "model", "poll_s"))
    names = ("memory_gib", "redis", "directory", "verify", "threads", "device")
    rows = _row_options({name: values.pop(name) for name in names})
    rows |= {name: values.pop(name) for name in ("encoded", "cache")}
    if rows["cache"] is not None:
        rows["cache"] = local("--cache", rows["cache"])
        if rows["cache"].exists() and not rows["cache"].is_dir():
            raise RecipeError(f"--cache: got {rows['cache']}, expected a directory")
    options = ServeOptions(**values)
    token = options.token()
    sources = _parse_models(source, models)
    try:
        from hotbed.serve.monitoring import json_logs
        from hotbed.serve.redis_records import check_address
        from hotbed.serve.server import Served, Server, listen
    except ImportError as error:
        raise RecipeError(f"hotbed serve needs more libraries ({error}): pip install 'hotbed[serve]'") from None

    if rows["redis"] is not None:
        check_address(rows["redis"])
    with listen(options) as taken, json_logs(), ExitStack() as opened:
        served = dict[str, Served]()
        for name, at in sources.items():
            found = _open_model(name, at, rows, poll_s, opened)
            if found.name in served:
                raise RecipeError(f"two models are named {found.name!r}. Set other names with --model NAME=DIR")
            served[found.name] = found
        try:
            Server(list(served.values()), options, taken, token).run()
        except StoppedError:
            opened.pop_all()  # end at once, without closing the models
            raise


def _row_options(given: dict[str, Any], environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Check the options for storing rows, and convert them to options of `ServedModel.open`."""
    found = dict(given)
    memory_gib, redis, folder = found.pop("memory_gib"), found["redis"], found["directory"]
    option = REDIS_VARIABLE if redis is None else "--redis"
    found["redis"] = environment.get(REDIS_VARIABLE) if redis is None else redis
    if folder is not None and not Path(folder).is_dir():
        raise RecipeError(f"--directory: got {folder}, expected a directory that exists")
    if found["redis"] is not None and memory_gib is None:
        raise RecipeError(
            f"{option} caches rows that are in files, but without --memory_gib all rows are in memory. Set "
            f"--memory_gib, or remove {option}"
        )
    return {"memory_bytes": None if memory_gib is None else int(memory_gib * 2**30), **found}


def _path_name(name: str) -> str:
    """Convert a recipe's name for request paths, which may have letters, digits, '.', '_' and '-'."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip("._-")[:100] or "model"


def _open_model(name: str | None, source: str, rows: Mapping[str, Any], poll_s: float, opened: ExitStack) -> Served:
    """Open a model. If training publishes to its directory, also start to follow the directory."""
    from hotbed.checkpoint.storage import directory
    from hotbed.serve.follower import Follower, open_newest
    from hotbed.serve.model_files import MANIFEST
    from hotbed.serve.server import Served

    folder = directory(location(source))
    model = open_newest(folder, **rows)
    opened.callback(model.close)
    follower = None
    if not folder.has(MANIFEST):
        follower = Follower(model, folder, interval_s=poll_s, verify=rows["verify"], cache=rows["cache"])
        opened.callback(follower.close)
        follower.poll()  # so that the newest version answers the first request
        follower.start()
    return Served(name or _path_name(model.name or ""), model, follower)


def _parse_models(source: str | None, models: list[str]) -> dict[str | None, str]:
    """Return the path or URI of each model by its name. The key None means the name that is stored in the model."""
    named: dict[str | None, str] = {} if source is None else {None: source}
    for model in models:
        name, _, at = model.partition("=")
        if not _NAME.fullmatch(name) or not at:
            expected = "NAME=DIR with a name of letters, digits, '.', '_' and '-'"
            raise RecipeError(f"--model: got {model!r}, expected {expected}")
        if name in named:
            raise RecipeError(f"--model: got {name!r} twice. Choose a different name for each model")
        named[name] = at
    if not named:
        raise RecipeError("models: got none to serve. Pass a directory of hotbed export, or --model NAME=DIR")
    return named
