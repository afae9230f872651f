"""Which protocols a table asks for: presets by name, cut down to its kinds and to the epochs that were given."""

import dataclasses
from collections.abc import Sequence

from pmae.evaluate.protocols import Protocols, only, preset

PROBES = ("linear", "mlp")
"""The kinds that augmentation makes a difference to."""


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
        name=f"{protocols.name}, {epochs} epochs",
        probe=probe
        and dataclasses.replace(probe, epochs=epochs, warmup_epochs=probe.warmup_epochs * epochs / probe.epochs),
        finetune=tune
        and dataclasses.replace(tune, epochs=epochs, warmup_epochs=tune.warmup_epochs * epochs / tune.epochs),
    )
