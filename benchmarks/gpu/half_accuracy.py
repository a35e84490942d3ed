"""How accurate FP16 is in each engine and in torch itself, against FP64: a loss of accuracy, or a check that is too strict?

`noise` is the RMS error over the standard deviation between the rows of a batch; networks are of
torchvision or `timm:NAME`, as they are drawn, and with batch normalisation settled on its input, as training leaves it.
"""

import argparse
import copy
import tempfile
from pathlib import Path
from typing import Any

import torch

import trt_engine as te


def network(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if name.startswith("timm:"):
        import timm

        return timm.create_model(name[5:]).eval()
    import torchvision

    return torchvision.models.get_model(name, weights=None).eval()


def settle(net: torch.nn.Module, x: torch.Tensor) -> torch.nn.Module:
    for module in net.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = None
            module.reset_running_stats()
            module.train()
    net(x)
    return net.eval()


def report(way: str, got: Any, want: torch.Tensor, parity: str = "") -> None:
    apart = torch.as_tensor(got, device=want.device).double() - want
    noise = float(apart.square().mean().sqrt() / want.std(0).square().mean().sqrt())
    print(
        f"  {way:<22} noise {noise:.2g}  largest {float(apart.abs().max()):.2g} of {float(want.abs().max()):.3g}  {parity}"
    )


def measure(net: torch.nn.Module, x: torch.Tensor, folder: Path) -> None:
    want = copy.deepcopy(net).double()(x.double())
    report("torch FP32", net(x), want)
    report("torch FP16", copy.deepcopy(net).half()(x.half()), want)
    path = folder / "net.onnx"
    torch.onnx.export(net, (x,), path, input_names=["x"], opset_version=17, dynamo=False)
    for backend in ("inductor", "onnxruntime"):
        settings: dict[str, Any] = {"backend": backend, "device": "cuda:0", "precision": "fp16", "allow_fallback": True}
        try:
            parity = str(te.build(path, **settings, out=folder / f"{backend}.engine").passport.parity)[:400]
        except te.TrtEngineError as error:
            parity = f"REFUSED: {error.message}"
        engine = te.build(path, **settings, parity=False, out=folder / f"{backend}-unjudged.engine", rebuild=True)
        with te.load(engine, allow_fallback=True) as runner:
            kind = torch.float16 if "16" in str(engine.signature.inputs[0].dtype) else torch.float32
            report(f"{backend} FP16", next(iter(runner.infer({"x": x.to(kind).cpu().numpy()}).values())), want, parity)


if __name__ == "__main__":
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--models", nargs="+", default=["mobilenet_v3_large", "efficientnet_b0"])
    options.add_argument("--batch", type=int, default=64)
    given = options.parse_args()
    with torch.no_grad():
        for model in given.models:
            for settled in (False, True):
                print(f"{model}{', settled' if settled else ''}", flush=True)
                x = torch.rand(given.batch, 3, 224, 224, device="cuda:0")
                net = network(model).cuda()
                with tempfile.TemporaryDirectory() as made:
                    measure(settle(net, x) if settled else net, x, Path(made))
