"""Which protocols a table asks for: presets by name, cut down to its kinds and to the epochs that were given."""

import dataclasses
from collections.abc import Sequence

from pmae.errors import UserError
from pmae.evaluate.protocols import Protocols, only, preset
from pmae.paper.tables import Item

PROBES = ("linear", "mlp")
"""The kinds that augmentation makes a difference to."""


def kept(item: Item, kinds: Sequence[str]) -> list[str]:
    """The item's protocols, or those of them that were asked for."""
    found = [kind for kind in item.protocols if not kinds or kind in kinds]
    if item.protocols and not found:
        raise UserError(f"protocols of {item.name!r} must be among {', '.join(item.protocols)}, got {', '.join(kinds)}")
    return found


def chosen(presets: Sequence[str], kinds: Sequence[str], with_plain: bool, epochs: int | None) -> tuple[Protocols, ...]:
    """Some kinds under each preset; with probes also trained without augmentation if asked.

    k-NN is the same in all presets: the first one has it.
    """
    wanted = {name: [kind for kind in kinds if kind != "knn" or name == presets[0]] for name in presets}
    if with_plain:
        wanted.setdefault("plain", [kind for kind in kinds if kind in PROBES])
    return tuple(only(shortened(preset(name), epochs), some) for name, some in wanted.items() if some)


def shortened(protocols: Protocols, epochs: int | None) -> Protocols:
    """The same protocols with heads trained for fewer epochs, under a name that says so."""
    if epochs is None:
        return protocols
    probe, tune = protocols.probe, protocols.finetune
    return dataclasses.replace(
        protocols,
        name=f"{protocols.name}, {epochs} epoch{'s' * (epochs > 1)}",
        probe=probe
        and dataclasses.replace(probe, epochs=epochs, warmup_epochs=probe.warmup_epochs * epochs / probe.epochs),
        finetune=tune
        and dataclasses.replace(tune, epochs=epochs, warmup_epochs=tune.warmup_epochs * epochs / tune.epochs),
    )
