from stratagem.testing.contract import Lacks, StrategyContract


class TestDDP(StrategyContract):
    strategy = "ddp_find_unused_parameters_true"
    world_sizes = (1, 2, 3)
    supports_uneven_batches = Lacks("DistributedSampler pads")
    supports_bounded_hang = Lacks("x")
    supports_sync_batchnorm = Lacks("torch's SyncBatchNorm refuses CPU tensors")
