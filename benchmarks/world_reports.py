"""Configurations, scripts and logs in the spellings of public bug reports, and what has to be said about each.

Rebuilt: the lines that matter, with names and paths of our own. Each has the report that shows the spelling.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Report:
    """One text: `said` are patterns that the answer has to have, `exits` the exit codes that are right."""

    name: str
    file: str
    text: str
    said: tuple[str, ...]
    exits: tuple[int, ...] = (0,)
    parts: tuple[str, ...] = ("migrate", "{}", "--from", "8.6", "--to", "11.4")


_LOG = ("bench", "--parse-log", "{}", "--json")
_BANNER = "&&&& RUNNING TensorRT.trtexec [TensorRT v{}] # trtexec --onnx=net.onnx --saveEngine=net.engine\n"
_FAILED = "\n&&&& FAILED TensorRT.trtexec [TensorRT v{}] # trtexec --onnx=net.onnx --saveEngine=net.engine\n"


def _log(version: str, line: str) -> str:
    return _BANNER.format(version) + line + _FAILED.format(version)


REPORTS = (
    Report("trtexec.exe of a Windows thread (TensorRT#3801)", "build.bat",
           'set TRT=C:\\tools\\TensorRT-8.6\\bin\r\n"%TRT%\\trtexec.exe" --onnx=n.onnx --best '
           "--precisionConstraints=obey --saveEngine=n.engine\r\n", ("error: .*best", "precisionConstraints")),
    Report("pip in a shell script (TensorRT#4599)", "setup.sh", "pip3 install tensorrt==10.13.3.9\n", ("tensorrt==10.13",),
           parts=("migrate", "{}", "--to", "11.4")),
    Report("yolo command (ultralytics#22910)", "export.sh",
           "yolo export model=yolo11n.pt format=engine half=True int8=True\n", ("half",)),
    Report("YOLO.export (ultralytics#4597)", "export.py",
           'from ultralytics import YOLO\n\nYOLO("n.pt").export(format="engine", half=True, workspace=8)\n', ("half",)),
    Report("fp16_mode of mmdeploy", "detection_tensorrt.py",
           "_base_ = ['./base.py']\nbackend_config = dict(\n    type='tensorrt',\n"
           "    common_config=dict(fp16_mode=True, max_workspace_size=1 << 30))\n", ("fp16_mode",)),
    Report("enable_fp16 of Holoscan (holohub#1120)", "app.yaml",
           "inference:\n  backend: trt\n  enable_fp16: true\n  is_engine_path: false\n", ("enable_fp16",)),
    Report("options of ONNX Runtime's provider (onnxruntime#20355)", "serve.py",
           "import onnxruntime as ort\n\nproviders = [('TensorrtExecutionProvider', {'trt_fp16_enable': True, "
           "'trt_layer_norm_fp32_fallback': True})]\nort.InferenceSession('n.onnx', providers=providers)\n",
           ("trt_fp16_enable", "trt_layer_norm_fp32_fallback")),
    Report("network-mode of nvinfer (DeepStream-Yolo#389)", "config_infer_primary.txt",
           "[property]\ngpu-id=0\nonnx-file=n.onnx\nmodel-engine-file=model_b4_gpu0_fp16.engine\nbatch-size=4\n"
           "network-mode=2\nnum-detected-classes=80\n", ("network-mode",)),
    Report("accelerator of a Triton configuration (server#5587)", "config.pbtxt",
           'name: "n"\nplatform: "onnxruntime_onnx"\noptimization { execution_accelerators {\n'
           '  gpu_execution_accelerator : [ { name : "tensorrt"\n'
           '    parameters { key: "precision_mode" value: "FP16" } } ] } }\n', ("precision_mode",)),
    Report("builder of TensorRT 8 (TensorRT#3124)", "build.py",
           "import tensorrt as trt\n\nlogger = trt.Logger()\nbuilder = trt.Builder(logger)\n"
           "network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH))\n"
           "config = builder.create_builder_config()\nconfig.max_workspace_size = 1 << 30\n"
           "if builder.platform_has_fast_fp16:\n    config.set_flag(trt.BuilderFlag.FP16)\n"
           "engine = builder.build_engine(network, config)\n",
           ("max_workspace_size", "fp16-flag", "build_engine")),
    Report("node by number (log of 10.16.1)", "trtexec.log",
           _log("101601", '[01/02/2026-10:00:00] [E] [TRT] ModelImporter.cpp:963: While parsing node number 103 [Where -> '
                '"/prompt_encoder/Where_6_output_0"]:\n[01/02/2026-10:00:00] [E] [TRT] In function importWhere:\n[8] '
                "Assertion failed: elementwiseSelectDimCheck(dims): Where inputs do not broadcast"),
           (r'"error_node": ".*(Where_6|103)',), (0, 4), _LOG),
    Report("a missing model (log of 10.13)", "trtexec.log",
           _log("101300", "[01/02/2026-10:00:00] [E] [TRT] ModelImporter.cpp:1050: Input file cannot be found, or is not a "
                "regular file: models/net.onnx\n[01/02/2026-10:00:00] [E] Failed to parse onnx file"),
           (r"models/net\.onnx", r"(not_found|file_missing|missing)"), (0, 2), _LOG),
    Report("a reshape at run time (rf-detr#376)", "trtexec.log",
           _log("101001", "[01/02/2026-10:00:00] [E] Error[3]: IExecutionContext::enqueueV3: Error Code 7: Internal Error "
                "(IShuffleLayer /Reshape_3: reshaping failed for tensor: x reshape would change volume 2 to 16)"),
           ("shape_mismatch",), (0, 2, 4, 5, 10), _LOG),
    Report("a banner with the build (log of 10.13.3)", "trtexec.log",
           "&&&& RUNNING TensorRT.trtexec [TensorRT v101303] [b9] # trtexec --onnx=net.onnx\n"
           "[01/02/2026-10:00:00] [I] === Performance summary ===\n"
           "[01/02/2026-10:00:00] [I] Throughput: 512.5 qps\n"
           "[01/02/2026-10:00:00] [I] Latency: min = 1.9 ms, max = 2.4 ms, mean = 2 ms, median = 1.98 ms, "
           "percentile(90%) = 2.1 ms, percentile(95%) = 2.2 ms, percentile(99%) = 2.3 ms\n"
           "&&&& PASSED TensorRT.trtexec [TensorRT v101303] [b9]\n",
           (r'"trt_version": "10\.13\.3', r"512\.5"), (0,), _LOG),
    Report("nvinfer's logger (DeepStream forum)", "app.log",
           "0:00:01.5 123 0x55 ERROR nvinfer gstnvinfer.cpp:674:gst_nvinfer_logger:<pgie> NvDsInferContext[UID 1]: Error in "
           "NvDsInferContextImpl::buildModel()\n"
           "ERROR: [TRT]: 4: [shapeCompiler.cpp::evaluateShapeChecks::1276] Error Code 4: Internal Error (kOPT values for "
           "profile 0 violate shape constraints: condition '==' violated)\nERROR: Build engine failed from config file\n",
           ("shape|profile",), (0, 2, 4, 5), _LOG),
    Report("Python's logger (TensorRT#3292)", "app.log",
           "[01/02/2026-10:00:00] [TRT] [E] IRuntime::deserializeCudaEngine: Error Code 1: Serialization (Serialization "
           "assertion stdVersionRead == kSERIALIZATION_VERSION failed.Version tag does not match. Note: Current Version: "
           "240, Serialized Engine Version: 239)\nTraceback (most recent call last):\n  File \"app.py\", line 9, in main\n"
           "AttributeError: 'NoneType' object has no attribute 'create_execution_context'\n",
           ("engine_incompatible",), (0, 10), _LOG),
    Report("no importer (TensorRT#2577)", "trtexec.log",
           _log("8601", "[01/02/2026-10:00:00] [E] [TRT] ModelImporter.cpp:729: ERROR: builtin_op_importers.cpp:5412 In "
                'function importFallbackPluginImporter:\n[8] Assertion failed: creator && "Plugin not found, are the '
                'plugin name, version, and namespace correct?"'),
           ("plugin_not_found",), (0, 4), _LOG),
    Report("out of memory (TensorRT#3515)", "trtexec.log",
           _log("8601", "[01/02/2026-10:00:00] [E] Error[2]: [defaultAllocator.cpp::allocate::31] Error Code 1: Cuda "
                "Runtime (out of memory)\n[01/02/2026-10:00:00] [E] Error[2]: [virtualMemoryBuffer.cpp::resizePhysical::9] "
                "Error Code 2: OutOfMemory (no further information)"),
           ("out_of_memory",), (0, 11), _LOG),
    Report("a static model with shapes (TensorRT#2829)", "trtexec.log",
           _log("8503", "[01/02/2026-10:00:00] [E] Static model does not take explicit shapes since the shape of inference "
                "tensors will be determined by the model itself\n[01/02/2026-10:00:00] [E] Network And Config setup failed"),
           ("static_model_given_shapes",), (0, 2), _LOG),
    Report("an option that is gone (log of 11.2)", "trtexec.log",
           _log("110200", "[01/02/2026-10:00:00] [E] Unknown option: --fp16 --best"), ("unknown_option",), (0, 2, 3), _LOG),
)  # fmt: skip
