"""Whether the study that the run names, approved here, has this message."""

from ..message import SiteMessage
from ..study.protocol import message_faults
from ..trust.code import dataset_faults


def study_fault(message: SiteMessage) -> str:
    """Return what is outside the study: date, build, settings, trainer, round, data set. Without a study nothing is."""
    study = message.terms.study
    if study is None or message.public:
        return ""
    assert message.data is not None
    sent = message.kind, message.config, message.app, message.day, message.silo
    faults = message_faults(study, message.settings, *sent)
    faults += dataset_faults(study.name, study.datasets, message.silo, message.data)
    return next(iter(faults), "")
