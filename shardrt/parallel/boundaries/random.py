"""Random numbers under tensor parallelism: equal where activations are replicated, different where they are sharded.

The seed of torch's default generator says in which region a rank is, so nothing else has to be saved or restored with it:

    any other seed  ----enter_sharded---->     (c, rank + 1)      c: 36 bits drawn from the generator
    (c, 0)          ----enter_sharded---->     (c + 1, rank + 1)
    (c, rank + 1)   ----enter_replicated---->  (c, 0)             c is the same on all ranks
    (c, anything)   ----begin---->             (c + 1, 0)
    any other seed  ----end---->               (c, 0)

Where the seed is another, and in a model's first forward, `begin` compares the ranks' generators; if they differ, rank 0's c
is taken by all. So every rank of the mesh has to seed, or none.

Therefore regions survive whatever saves and restores the generator: recomputation by `torch.utils.checkpoint`, which may stop
in the middle of a region, `fork_rng`, and resuming. An exception leaves its region behind, and the next `begin` ends it. How
many numbers a rank draws in a region has no effect on the next one.

Whether anything is random is seen by the probabilities among the modules' attributes, and by a probe: in a model's first
forward in training the regions are entered in any case, and if no rank has drawn a number at its end, the generator goes back
to where it was. So functions with a constant probability and noise are found too.

The rule, equal masks where replicated and different ones where sharded, is Megatron-LM's (`tensor_parallel/random.py`).
"""

from __future__ import annotations

import ctypes
import warnings
from weakref import WeakKeyDictionary

import torch
from torch import nn

from ...comm import DeviceMesh

_COUNTER_BITS, _RANK_BITS = 36, 12
_COUNTER, _RANK, _SEED = 2**_COUNTER_BITS - 1, 2**_RANK_BITS - 1, 2**64 - 1
_TAG = 0x5A4D  # 16 bits: one in 65536 of the users' seeds looks like one of ours, which is harmless, since `begin` leaves it
_ODD = 0x9E3779B97F4A7C15  # multiplication by it distributes bits upwards
_INVERSE = pow(_ODD, -1, 2**64)


def manual_seed(seed: int, *, differ_over: DeviceMesh | None = None) -> None:
    """Seed torch's default generators, those of the CPU and of all GPUs, alike on every rank. No communication.

    Alike is right for what every rank computes on the same values: initial parameters, and dropout where activations are
    replicated over tensor parallel ranks. Where they are sharded, parallelized modules draw different numbers on each rank,
    from this seed, without more to do (Megatron-LM's rule). Operations that fill a `DTensor` use rank 0's seed, and do not
    depend on the number of ranks.
    differ_over: a mesh whose ranks shall draw different numbers, usually the data parallel one; give it once the model is
    initialised: `manual_seed(0)`, make the model, `manual_seed(1, differ_over=mesh["dp"])`. None: dropout has the same masks
    on all data parallel ranks, as in Megatron-LM.
    seed: an integer from -2^63 to 2^64 - 1. Raises ValueError for another.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**64:
        raise ValueError(f"manual_seed({seed!r}): expected an integer from -2^63 to 2^64 - 1")
    torch.manual_seed(seed if differ_over is None else _rotated((seed + differ_over.rank) * _ODD & _SEED))


def random_attributes(module: nn.Module) -> list[tuple[nn.Module, str]]:
    """The attributes in `module` and its submodules that say with which probability something is dropped, zero or not.

    Those are numbers whose name has "drop" in it, and `p` of modules whose class is named so.
    """
    found = []
    for submodule in module.modules():
        kind = type(submodule).__name__.lower()
        has_p = "drop" in kind or "stochastic" in kind
        for name, value in vars(submodule).items():
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if is_number and ("drop" in name.lower() or (name == "p" and has_p)):
                found.append((submodule, name))
    return found


class RandomRegions:
    """Switches the default generator of a mesh's device between the regions, at the boundaries of parallelized modules.

    mesh: the tensor parallel one, 1-D.
    enabled: whether anything is random, as `begin` found it; without, no method changes anything.
    draws: whether a model was seen to draw numbers whose probability is no attribute.
    A module that is not in training enters no region.
    Cost: a switch takes 2 to 3 us, without communication or a host sync.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        if mesh.size > _RANK:
            raise ValueError(f"random regions on {mesh}: expected at most {_RANK} ranks")
        self.enabled = self.draws = False
        self._mesh = mesh
        self._generator = default_generator(mesh.device)
        self._probe: _Probe | None = None
        self._attributes: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()

    def watch(self, module: nn.Module) -> None:
        """Have `begin` look at the probabilities in `module` and its submodules, which may change, while they live."""
        if self._mesh.size > 1:
            for owner, name in random_attributes(module):
                self._attributes.setdefault(owner, set()).add(name)

    def begin(self, *, training: bool, first: bool = False, known: bool = True) -> bool:
        """Start the forward of the outermost parallelized module, in a replicated region if it is in training.

        It is a new one: what a single rank drew in between has no effect.
        first: whether the module has not run yet.   known: whether it is known if it draws numbers.
        Returns: whether it will be known at the end.
        Cost: an exchange on the host in the first forward, and after each seeding; where nothing is random, two copies of the
        generator's state, 5 us.
        """
        self._probe, self.enabled = None, self._any_random()
        if training and not self.enabled and self._mesh.size > 1:
            self._probe = _Probe(self._generator, known)
            self.enabled = not known
        if self.enabled and training:
            if first or _region(self._generator) is None:
                self._agree()
            if (region := _region(self._generator)) is not None:
                self._seed(region[0] + 1, 0)
        return not known and self._probe is not None

    def end(self, *, training: bool) -> None:
        """End that forward, in a replicated region if it was in training. Collective where `begin` returned True."""
        if self._probe is not None:
            self._end_probe(self._probe)
        if self.enabled:
            if training and _region(self._generator) is None:
                self._generator.manual_seed(_seed(_draw(self._generator), 0))
            self.enter_replicated()

    def _end_probe(self, probe: _Probe) -> None:
        self._probe = None
        probe.look(self._generator)
        if not probe.known:
            self.enabled = self.draws = any(self._mesh.exchange(probe.drew))
            if not self.draws:
                self._generator.set_state(probe.before)
        elif probe.drew:
            warnings.warn(
                "a parallelized module that drew no random numbers in its first forward in training does now: ranks of "
                f"{self._mesh} drew the same ones where their activations are different parts; keep the probability in an "
                "attribute of the module, with 'drop' in its name",
                stacklevel=4,
            )

    def outside(self, *, training: bool) -> None:
        """What `begin` does once, for a module that runs outside of the forward of a parallelized one."""
        self.enabled = self._any_random()
        if self.enabled and training and _region(self._generator) is None:
            self._agree()
            self.end(training=True)

    def enter_sharded(self) -> None:
        """From here on, the ranks draw different numbers. Nothing changes if they do already."""
        if self.enabled and ((region := _region(self._generator)) is None or region[1] == 0):
            if self._probe is not None:
                self._probe.look(self._generator)
            counter = _draw(self._generator) if region is None else region[0]
            self._seed(counter + 1, self._mesh.rank + 1)

    def enter_replicated(self) -> None:
        """From here on, the ranks draw the same numbers. Nothing changes if they do already."""
        if self.enabled:
            counter, rank = _region(self._generator) or (0, 0)
            if rank > 0:
                if self._probe is not None:
                    self._probe.look(self._generator)
                self._seed(counter, 0)

    def _seed(self, counter: int, rank: int) -> None:
        self._generator.manual_seed(_seed(counter, rank))
        if self._probe is not None:
            self._probe.mark = _state(self._generator)

    def counter(self) -> int | None:
        """The counter of the region that the generator is in, alike on all ranks of the mesh; None before the first forward."""
        region = _region(self._generator)
        return None if region is None else region[0]

    def fingerprint(self) -> int:
        """A number of 36 bits that differs where ranks would draw different numbers in replicated regions. Changes nothing."""
        region = _region(self._generator)
        if region is not None and region[1] > 0:
            return region[0]
        copy = torch.Generator(self._generator.device)
        copy.set_state(self._generator.get_state())
        return _draw(copy)

    def _any_random(self) -> bool:
        return self.draws or any(getattr(owner, name) > 0 for owner, names in self._attributes.items() for name in names)

    def _agree(self) -> None:
        """Have the ranks draw the same numbers: rank 0's, if theirs differ. Collective."""
        found = self._mesh.exchange(self.fingerprint())
        if len(set(found)) > 1:
            self._seed(found[0], 0)


class _Probe:
    """Sees whether a forward draws numbers. before: the generator's state when it began.   known: see `RandomRegions.begin`."""

    __slots__ = ("before", "drew", "known", "mark")

    def __init__(self, generator: torch.Generator, known: bool) -> None:
        self.before, self.mark = generator.get_state(), _state(generator)
        self.drew, self.known = False, known

    def look(self, generator: torch.Generator) -> None:
        self.drew = self.drew or self.mark != _state(generator)


def _state(generator: torch.Generator) -> bytes:
    """The generator's state, read without operations of torch, which a mode that watches them would see."""
    state = generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.nbytes)


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that operations on `device` draw from unless they are given one."""
    if device.type == "cuda":
        return torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    return torch.default_generator


def _seed(counter: int, rank: int) -> int:
    """The seed of a region. Generators on a CPU use its lower 32 bits only, which depend on all of the counter."""
    return _rotated((_TAG << _COUNTER_BITS + _RANK_BITS | (counter & _COUNTER) << _RANK_BITS | rank) * _ODD & _SEED)


def _region(generator: torch.Generator) -> tuple[int, int] | None:
    """The counter and the rank plus 1 (0: replicated) of the region that the generator was seeded for; None if for none."""
    fields = _rotated(generator.initial_seed() & _SEED) * _INVERSE & _SEED
    if fields >> _COUNTER_BITS + _RANK_BITS != _TAG:
        return None
    return fields >> _RANK_BITS & _COUNTER, fields & _RANK


def _rotated(bits: int) -> int:
    """64 bits with their halves exchanged."""
    return bits >> 32 | (bits & 2**32 - 1) << 32


def _draw(generator: torch.Generator) -> int:
    """A counter to begin with, by the generator's state."""
    if generator.device.type == "cuda":  # Cost: to draw would be a host sync; the state is two integers on the host
        return (generator.initial_seed() * _ODD + generator.get_offset()) * _ODD >> 28 & _COUNTER
    return int(torch.randint(2**_COUNTER_BITS, (), generator=generator, device="cpu"))
