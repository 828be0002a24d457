"""Checkpoints of a training run, by Orbax, so that a stopped run goes on where it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp

Tree = TypeVar("Tree")


class Checkpoint:
    """The newest checkpoint in a folder: a tree of arrays, and a record of anything that JSON can say.

    Args:
      folder: made where it does not exist.
      every: save() does something after so many steps, and after the last one.
      settings: what the run depends on. A checkpoint of other settings is refused.
    """

    def __init__(self, folder: Path, every: int, settings: dict[str, Any]):
        if every < 1:
            raise ValueError(f"every must be at least 1, got {every}")
        self._settings, self._every = settings, every
        # What is saved asynchronously might be overwritten by the next step, which reuses its memory.
        how = ocp.CheckpointManagerOptions(max_to_keep=1, enable_async_checkpointing=False)
        self._manager = ocp.CheckpointManager(folder.absolute(), options=how)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self._manager.close()

    def save(self, step: int, tree: Any, record: dict[str, Any], last: bool) -> None:
        """Saves what there is after `step` steps, if it is time to."""
        if not last and step % self._every:
            return
        parts = ocp.args.Composite(
            tree=ocp.args.StandardSave(_by_name(tree)),
            record=ocp.args.JsonSave({"settings": self._settings, "record": record}),
        )
        self._manager.save(step, args=parts, force=True)

    def restore(self, tree: Tree) -> tuple[Tree, dict[str, Any]] | None:
        """(tree, record) as they were saved, on the devices of the given tree; None where nothing has been saved.

        Raises:
          ValueError: for a checkpoint of other settings.
        """
        step = self._manager.latest_step()
        if step is None:
            return None
        saved = self._manager.restore(step, args=ocp.args.Composite(record=ocp.args.JsonRestore()))["record"]
        for name, value in self._settings.items():
            if saved["settings"].get(name) != value:
                raise ValueError(
                    f"{name} must be {saved['settings'].get(name)!r}, as in the run that the checkpoint is of, got {value!r}"
                )
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
        parts = ocp.args.Composite(tree=ocp.args.StandardRestore(_by_name(like)))
        arrays = self._manager.restore(step, args=parts)["tree"]
        return jax.tree.unflatten(jax.tree.structure(tree), [arrays[name] for name in _by_name(tree)]), saved["record"]


def _by_name(tree: Any) -> dict[str, Any]:
    """The leaves by their path, for Orbax need not know the nodes of every library."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
