"""Many ranks in one view: the engines of an ipyparallel cluster, and processes that the notebook launched."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from ..errors import LoaderGuardError
from .follow import Cluster
from .wire import is_client

_clusters: list[Cluster] = []


def follow(client: Any = None) -> Cluster:
    """Guard every engine of an ipyparallel client, and return what shows and reaches all of them.

    The same client gives the same object. Without a client: the one that there is; or, if there is none,
    the processes that this notebook launched with `ranked`.
    """
    if client is not None:
        _check(client)
    _clusters[:] = [one for one in _clusters if not one.is_closed]
    known = [one for one in _clusters if not one.is_over and (client is None or one.client is client)]
    if known:
        return known[-1]
    new = Cluster(client)
    _clusters.append(new)
    return new


def current() -> Cluster | None:
    """Return the latest one that is open."""
    return next((one for one in reversed(_clusters) if not one.is_over), None)


def close_all() -> None:
    """Follow no cluster any longer; the engines stay guarded."""
    while _clusters:
        _clusters.pop().close()


def _check(client: Any) -> None:
    """Say in a line what is missing, or that this is no client."""
    try:
        is_one = is_client(client)
    except ImportError:
        raise LoaderGuardError(
            "many machines need ipyparallel, which is not installed here: pip install 'jupyter_loaderguard[cluster]'"
        ) from None
    if not is_one:
        raise LoaderGuardError(f"this {type(client).__name__} is not an ipyparallel Client")


class _Clusters(ModuleType):
    """This module, as something that can be called."""

    def __call__(self, client: Any = None) -> Cluster:
        """Guard every engine of a client, and return what shows and reaches all of them."""
        return follow(client)


sys.modules[__name__].__class__ = _Clusters
