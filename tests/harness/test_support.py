from harness import implementation, support


def test_degrees_are_those_that_an_implementation_does_not_refuse() -> None:
    assert support.axes(implementation.load("native.ddp")) == ["single", "data"]
    assert support.axes(implementation.load("native.zero")) == ["single", "data", "shard"]
    assert support.axes(implementation.load("reference")) == ["single"]


def test_refusals_come_with_their_reasons() -> None:
    assert list(support.refusals(implementation.load("native.zero"))) == []
    refused = dict(support.refusals(implementation.load("torch.ddp")))
    assert refused == {"synchronised_batch_norm": "torch.nn.SyncBatchNorm runs on accelerators only"}
