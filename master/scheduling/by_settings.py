"""The scheduling that the settings ask for. It only puts parts together."""

from kvstore.kvcache.models.named import find_model
from kvstore.master.config import MasterSettings
from kvstore.master.directory.directory import Directory
from kvstore.master.scheduling.engine_caches import EngineCaches
from kvstore.master.scheduling.estimators import LiveEstimators
from kvstore.master.scheduling.instances import Instances
from kvstore.master.scheduling.scheduling import FindPrefixes, Replicate, Scheduling
from kvstore.protocol.errors import ConfigError
from kvstore.scheduler.admission import make_admission
from kvstore.scheduler.baselines import make_dispatcher
from kvstore.scheduler.estimators.analytic import AnalyticModel, find_gpu

NS_PER_US = 1000


def make_estimators(settings: MasterSettings) -> LiveEstimators:
    """Raises ConfigError: model or GPU is not known, one is given without the other, or the one does not fit on the other."""
    if bool(settings.scheduler_model) != bool(settings.scheduler_gpu):
        raise ConfigError("scheduler_model and scheduler_gpu go together: give both, or neither")
    if not settings.scheduler_model:
        return LiveEstimators(None)
    model, gpu = find_model(settings.scheduler_model), find_gpu(settings.scheduler_gpu)
    return LiveEstimators(AnalyticModel(model, gpu, gpus=settings.scheduler_gpus))


def make_scheduling(
    settings: MasterSettings,
    directory: Directory,
    estimators: LiveEstimators,
    *,
    replicate: Replicate,
    wall_ns: int,
    prefixes: FindPrefixes | None = None,
) -> Scheduling:
    """`wall_ns` is the wall clock: request ids count from its microseconds, so that a master that is started again repeats none, and
    they are still whole numbers in the JSON that engines pass on. `prefixes`: None for those that the directory knows."""
    views = estimators.for_dispatcher()
    return Scheduling(
        directory,
        Instances(instance_ttl_s=settings.instance_ttl_s, max_instances=settings.max_instances),
        EngineCaches(max_blocks=settings.max_engine_blocks),
        make_dispatcher(settings.dispatcher, views, threshold=settings.kvcache_balancing_threshold, seed=wall_ns),
        estimators,
        admission=make_admission(settings.admission, estimators, load_limit=settings.admission_load_limit),
        replicate=replicate,
        prefixes=prefixes or directory.queries.prefixes,
        decision_ttl_s=settings.decision_ttl_s,
        first_request_id=wall_ns // NS_PER_US,
    )
