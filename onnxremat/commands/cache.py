"""The ``cache`` command: what the user's cache takes, and how to empty it."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from ..cache import KINDS, CacheUse, cache_root, clear_cache, usage
from ..console import columns, print_json, say
from ..errors import OK
from ..units import format_bytes


def add_parser(commands: Any, common: argparse.ArgumentParser) -> None:
    """Add ``cache info`` and ``cache clear`` to the commands."""
    cache = commands.add_parser("cache", help="what is kept of exports and measurements")
    actions = cache.add_subparsers(dest="action", required=True, metavar="ACTION")
    info = actions.add_parser("info", parents=[common], help="where it is, and what it takes")
    info.set_defaults(run=_info)
    clear = actions.add_parser("clear", parents=[common], help="delete it")
    clear.add_argument("kind", nargs="*", metavar="KIND", help=f"{', '.join(KINDS)}; left out, all of them")
    clear.set_defaults(run=_clear)


def _info(options: argparse.Namespace) -> int:
    rows = usage()
    if options.json:
        print_json({"folder": str(cache_root()), "kinds": [asdict(row) for row in rows]})
        return OK
    say(str(cache_root()))
    cells = [(row.kind, str(row.entries), format_bytes(row.bytes), KINDS[row.kind]) for row in rows]
    for line in columns(("kind", "entries", "bytes", "content"), cells):
        say(line)
    return OK


def _clear(options: argparse.Namespace) -> int:
    freed: list[CacheUse] = clear_cache(options.kind)
    entries, size = sum(row.entries for row in freed), sum(row.bytes for row in freed)
    if options.json:
        print_json({"folder": str(cache_root()), "entries": entries, "bytes": size, "kinds": [asdict(row) for row in freed]})
    else:
        say(f"{cache_root()}: {entries} entries deleted, {format_bytes(size)}")
    return OK
