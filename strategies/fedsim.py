"""FedSim, FedAlt, FedPer and FedRep: partial model personalisation by gradient descent.

min_{u,V} (1/N) sum_i f_i(u, v_i), u shared, v_i personal (Pillutla et al., ICML 2022, arXiv 2204.03809).

    FedSim   u and v_i take joint steps on the same batches
    FedAlt   first v_i with u fixed, then u with the new v_i fixed
    FedPer   FedSim with the highest blocks personal (Arivazhagan et al. 2019, arXiv 1912.00818)
    FedRep   FedAlt with the highest blocks personal, τ head epochs, then body epochs (Collins et al., ICML 2021,
             arXiv 2102.07078)

Server: the sample-weighted mean of the u_i. Sent: Σ_s down, Σ_s up. Kept: server u; silo v_i. An absent silo keeps
its v_i. Special cases: nothing personal is FedAvg bit for bit, all personal is Local bit for bit, FedSim with input
personalisation is LG-FedAvg. FedAlt needs twice the gradient evaluations of FedSim for the same number of epochs.
Evaluated (FedPer and FedRep, as their comparisons do): the averaged u with the silo's own v_i, before local training.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from models.flat import gather
from strategies.base.info import OWN_LAYERS, NoisedEpochs
from strategies.base.partial import PartialClient, PartialSettings, PartialStrategy
from strategies.base.settings import setting
from strategies.base.transport.kinds import SHARED_AT


class FedSim(PartialStrategy):
    info = OWN_LAYERS(
        name="fedsim",
        title="Partial personalisation, simultaneous steps",
        paper="Pillutla et al., ICML 2022, arXiv 2204.03809",
        spelling="FedSim",
        uploads={"shared": SHARED_AT},
    )


class FedPer(PartialStrategy):
    info = OWN_LAYERS(
        name="fedper",
        title="Personal output layers",
        paper="Arivazhagan et al. 2019, arXiv 1912.00818",
        spelling="FedPer",
        uploads={"shared": SHARED_AT},
        reports="received",
    )


@dataclass(frozen=True)
class AltSettings(PartialSettings):
    """Settings of FedAlt."""

    personal_epochs: int = setting(
        0,
        "epochs on the personal part, 0: local-epochs",
        symbol="τ_v",
        minimum=0,
        kind="epochs",
    )
    shared_epochs: int = setting(
        0, "epochs on the shared part, 0: local-epochs", symbol="τ_u", minimum=0, kind="epochs"
    )


class FedAltClient(PartialClient):
    settings: AltSettings

    def epochs(self) -> tuple[int, int]:
        """Return the epochs on the personal and on the shared part."""
        s, default = self.settings, self.common.local_epochs
        return s.personal_epochs or default, s.shared_epochs or default

    def noised_passes(self) -> tuple[int, ...]:
        return self.epochs()

    def local_update(self) -> list[Tensor]:
        personal, shared = self.epochs()
        if self.private:  # without a shared part this is Local, batch for batch
            purpose = "personal" if self.shared else "train"
            self.train(
                parts=self.private, epochs=personal, purpose=purpose, optimizer_key="personal"
            )
        if self.shared:
            self.train(parts=self.shared, epochs=shared, optimizer_key="shared")
        return [gather(self.model.vector, self.shared)]


class FedAlt(PartialStrategy):
    info = OWN_LAYERS(
        name="fedalt",
        title="Partial personalisation, alternating steps",
        paper="Pillutla et al., ICML 2022, arXiv 2204.03809",
        spelling="FedAlt",
        dp_epochs=(
            NoisedEpochs("fedalt.personal-epochs"),
            NoisedEpochs("fedalt.shared-epochs"),
        ),
        uploads={"shared": SHARED_AT},
    )
    client = FedAltClient
    Settings = AltSettings


@dataclass(frozen=True)
class RepSettings(PartialSettings):
    """Settings of FedRep; defaults of its official CIFAR-10 runs."""

    head_epochs: int = setting(10, "epochs on the head", symbol="τ", minimum=1, kind="epochs")
    body_epochs: int = setting(1, "epochs on the body", minimum=1, kind="epochs")


class FedRepClient(FedAltClient):
    settings: RepSettings  # type: ignore[assignment]

    def epochs(self) -> tuple[int, int]:
        return self.settings.head_epochs, self.settings.body_epochs


class FedRep(PartialStrategy):
    info = OWN_LAYERS(
        name="fedrep",
        title="Shared representation, personal head",
        paper="Collins et al., ICML 2021, arXiv 2102.07078",
        spelling="FedRep",
        dp_epochs=(NoisedEpochs("fedrep.head-epochs"), NoisedEpochs("fedrep.body-epochs")),
        uploads={"shared": SHARED_AT},
        reports="received",
    )
    client = FedRepClient
    Settings = RepSettings
