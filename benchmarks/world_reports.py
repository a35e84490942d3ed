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


_ANY = (0, 2, 3, 4, 5, 10, 11)
"""Exit codes of a log: its failure's, or 0."""
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
    Report("no profile (onnx-tensorrt#725)", "trtexec.log",
           _log("8001", "[01/02/2026-10:00:00] [E] Error[4]: [network.cpp::validate::2684] Error Code 4: Internal"
           " Error (Network has dynamic or shape inputs, but no optimization profile has been define"
           "d.)\n"
           "[01/02/2026-10:00:00] [E] Error[2]: [builder.cpp::buildSerializedNetwork::417] Error Cod"
           "e 2: Internal Error (Assertion enginePtr != nullptr failed. )"),
           ("shape_mismatch",), _ANY, _LOG),
    Report("no profile old (onnx-tensorrt#518)", "trtexec.log",
           "Building TensorRT engine, FP16 available:1\n"
           "[2020-08-20 11:03:50   ERROR] Network has dynamic or shape inputs, but no optimization p"
           "rofile has been defined.\n"
           "[2020-08-20 11:03:50   ERROR] Network validation failed.\n"
           "terminate called after throwing an instance of 'std::runtime_error'\n",
           ("shape_mismatch",), _ANY, _LOG),
    Report("missing dimensions (TensorRT#1812)", "trtexec.log",
           "[02/22/2022-03:35:30] [TRT] [E] 4: [network.cpp::validate::2948] Error Code 4: Internal "
           "Error (inputs:0: dynamic input is missing dimensions in profile 0.)\n"
           "[02/22/2022-03:35:30] [TRT] [E] 2: [builder.cpp::buildSerializedNetwork::609] Error Code"
           " 2: Internal Error (Assertion enginePtr != nullptr failed. )\n",
           ("shape_mismatch",), _ANY, _LOG),
    Report("Mod (TensorRT#2968)", "trtexec.log",
           "[error][trt_builder.cpp:30]:NVInfer: TensorRT\\onnx_parser\\ModelImporter.cpp:736: While p"
           "arsing node number 297 [Mod -> \"onnx::Sub_211\"]:\n"
           "[error][trt_builder.cpp:30]:NVInfer: TensorRT\\onnx_parser\\ModelImporter.cpp:741: ERROR: "
           "TensorRT\\onnx_parser\\builtin_op_importers.cpp:4951 In function importFallbackPluginImpor"
           "ter:\n"
           "[8] Assertion failed: creator && \"Plugin not found, are the plugin name, version, and na"
           "mespace correct?\"\n",
           ("plugin_not_found",), _ANY, _LOG),
    Report("recurrence (TensorRT#411)", "trtexec.log",
           _log("8001", "[01/02/2026-10:00:00] [E] Error[4]: [layers.cpp::validateRecurrence::4932] Error Code 4:"
           " Internal Error ((Unnamed Layer* 31) [Recurrence]: recurrence inputs must have same type"
           ")\n"
           "[01/02/2026-10:00:00] [E] Error[2]: [builder.cpp::buildSerializedNetwork::417] Error Cod"
           "e 2: Internal Error (Assertion enginePtr != nullptr failed.)"),
           ("recurrence inputs",), _ANY, _LOG),
    Report("no importer NonZero (onnx-tensorrt#401)", "trtexec.log",
           "ERROR: TensorRT/parsers/onnx/ModelImporter.cpp:134 In function parseGraph:\n"
           "[8] No importer registered for op: NonZero\n",
           ("plugin_not_found",), _ANY, _LOG),
    Report("NonZero on RTX (TensorRT-RTX#36)", "trtexec.log",
           "[07/08/2026-12:08:04] [TRT] [E] [tacticSupply.cpp::getSupportedFormats::48] Error Code 2"
           ": Internal Error (Assertion !layerImpls.empty() failed. /model/decoder/NonZero has no ru"
           "nners that implement it In getSupportedFormats at /_src/optimizer/builder/tacticSupply.c"
           "pp:48)\n",
           ("no_implementation",), _ANY, _LOG),
    Report("UINT8 input (onnx-tensorrt#400)", "trtexec.log",
           "Unsupported ONNX data type: UINT8 (2)\n"
           "ERROR: ModelImporter.cpp:54 In function importInput:\n"
           "[8] Assertion failed: convert_dtype(onnx_tensor_type.elem_type(), &trt_dtype)\n"
           "[05/29/2020-10:13:46] [E] Failed to parse onnx file\n"
           "&&&& FAILED TensorRT.trtexec # ./trtexec --onnx=inception_standard.onnx\n",
           ("data_type_not_supported",), _ANY, _LOG),
    Report("no calibrator (TensorRT#1827)", "trtexec.log",
           "[TRT] [W] Calibrator is not being used. Users must provide dynamic range for all tensors"
           " that are not Int32 or Bool.\n"
           "[01/14/2022-11:18:37] [TRT] [E] 4: [standardEngineBuilder.cpp::initCalibrationParams::14"
           "02] Error Code 4: Internal Error (Calibration failure occurred with no scaling factors d"
           "etected. This could be due to no int8 calibrator or insufficient custom scales for netwo"
           "rk layers. Please see int8 sample to setup calibration correctly.)\n",
           ("scales_missing",), _ANY, _LOG),
    Report("missing scale (TensorRT#1785)", "trtexec.log",
           _log("8205", "[01/02/2026-10:00:00] [E] Error[4]: [standardEngineBuilder.cpp::initCalibrationParams::1"
           "402] Error Code 4: Internal Error (Missing scale and zero-point for tensor (Unnamed Laye"
           "r* 12) [Shuffle]_output, expect fall back to non-int8 implementation for any layer consu"
           "ming or producing given tensor)"),
           ("scales_missing",), _ANY, _LOG),
    Report("bias quantisation (TensorRT#2984)", "trtexec.log",
           _log("8600", "[01/02/2026-10:00:00] [E] Error[2]: [weightConvertors.cpp::quantizeBiasCommon::310] Erro"
           "r Code 2: Internal Error (Assertion getter(i) != 0 failed. )\n"
           "[01/02/2026-10:00:00] [E] Engine could not be created from network"),
           ("scales_missing",), _ANY, _LOG),
    Report("min max (TensorRT#1634)", "trtexec.log",
           "[TensorRT] INFO: Starting Calibration.\n"
           "[TensorRT] ERROR: 2: [quantization.cpp::DynamicRange::65] Error Code 2: Internal Error ("
           "Assertion min_ <= max_ failed.)\n",
           ("scales_missing",), _ANY, _LOG),
    Report("no shape specified (LightGlue-ONNX#78)", "trtexec.log",
           "[E:onnxruntime:, inference_session.cc:1785 operator()] Exception during initialization: "
           "/onnxruntime_src/onnxruntime/core/providers/tensorrt/tensorrt_execution_provider.cc:1552"
           " SubGraphCollection_t onnxruntime::TensorrtExecutionProvider::GetSupportedList(...) cons"
           "t [ONNXRuntimeError] : 1 : FAIL : TensorRT input: /NonZero_output_0 has no shape specifi"
           "ed. Please run shape inference on the onnx model first.\n",
           ("shape_mismatch",), _ANY, _LOG),
    Report("stdVersionRead (TensorRT forum)", "trtexec.log",
           "[E] [TRT] 1: [stdArchiveReader.cpp::StdArchiveReader::32] Error Code 1: Serialization (S"
           "erialization assertion stdVersionRead == serializationVersion failed.Version tag does no"
           "t match. Note: Current Version: 232, Serialized Engine Version: 205)\n"
           "[E] [TRT] 4: [runtime.cpp::deserializeCudaEngine::66] Error Code 4: Internal Error (Engi"
           "ne deserialization failed.)\n",
           ("engine_incompatible",), _ANY, _LOG),
    Report("magic tag (ultralytics)", "trtexec.log",
           "[TRT] [E] 1: [runtime.cpp::parsePlan::314] Error Code 1: Serialization (Serialization as"
           "sertion plan->header.magicTag == rt::kPLAN_MAGIC_TAG failed.)\n"
           "AttributeError: 'NoneType' object has no attribute 'create_execution_context'\n",
           ("engine_incompatible",), _ANY, _LOG),
    Report("compute capability (TensorRT#2271)", "trtexec.log",
           _log("8401", "[01/02/2026-10:00:00] [E] Error[6]: The engine plan file is generated on an incompatible"
           " device, expecting compute 8.6 got compute 7.5, please rebuild.\n"
           "[01/02/2026-10:00:00] [E] Error[4]: [runtime.cpp::deserializeCudaEngine::50] Error Code "
           "4: Internal Error (Engine deserialization failed.)"),
           ("engine_incompatible",), _ANY, _LOG),
    Report("tactic memory (TensorRT#1917)", "trtexec.log",
           _log("8205", "[01/02/2026-10:00:00] [W] [TRT] Skipping tactic 2 due to insufficient memory on requeste"
           "d size of 9663676416 detected for tactic 0x2.\n"
           "[01/02/2026-10:00:00] [E] Error[10]: [optimizer.cpp::computeCosts::2011] Error Code 10: "
           "Internal Error (Could not find any implementation for node {ForeignNode[...]}.)"),
           ("--workspace",), _ANY, _LOG),
    Report("driver (TensorRT)", "trtexec.log",
           _log("8601", "[01/02/2026-10:00:00] [E] Error[1]: [cudaDriverHelpers] CUDA initialization failure with"
           " error: 35\n"
           "[01/02/2026-10:00:00] [E] Cuda failure: CUDA driver version is insufficient for CUDA run"
           "time version"),
           ("cuda_unavailable",), _ANY, _LOG),
    Report("profile shape at run (ultralytics)", "trtexec.log",
           "[TRT] [E] IExecutionContext::setInputShape: Error Code 3: API Usage Error (Parameter che"
           "ck failed, condition: engineDims.d[i] == dims.d[i]. Static dimension mismatch while sett"
           "ing input shape for images. Set dimensions are [1,3,640,480]. Expected dimensions are [1"
           ",3,640,640].)\n",
           ("shape_mismatch",), _ANY, _LOG),
    Report("out of range profile (TensorRT#3282)", "trtexec.log",
           "[TRT] [E] 3: [executionContext.cpp::validateInputBindings::2087] Error Code 3: API Usage"
           " Error (Parameter check failed at: runtime/api/executionContext.cpp::validateInputBindin"
           "gs::2087, condition: profileMaxDims.d[i] >= dimensions.d[i]. Supplied binding dimension "
           "[8,3,640,640] for bindings[0] exceed min ~ max range at index 0, maximum dimension in pr"
           "ofile is 4, minimum dimension in profile is 1, but supplied dimension is 8.\n"
           ")\n",
           ("shape_mismatch",), _ANY, _LOG),
    Report("IIf (TensorRT)", "trtexec.log",
           _log("8601", "[01/02/2026-10:00:00] [E] [TRT] ModelImporter.cpp:768: While parsing node number 12 [If "
           "-> \"y\"]:\n"
           "[01/02/2026-10:00:00] [E] [TRT] ModelImporter.cpp:774: ERROR: ModelImporter.cpp:180 In f"
           "unction parseGraph:\n"
           "[6] Invalid Node - If_12\n"
           "(Unnamed Layer* 5) [Output]: IIfConditionalOutputLayer inputs must have the same shape. "
           "Shapes are [-1] and [1,-1]."),
           ("If_12",), _ANY, _LOG),
    Report("a file that is no ONNX (TensorRT)", "trtexec.log",
           _log("8601", "[01/02/2026-10:00:00] [E] [TRT] onnxErrorRecorder.cpp: Failed to parse ONNX model from f"
           "ile net.onnx: [libprotobuf ERROR google/protobuf/text_format.cc:298] Error parsing text-"
           "format onnx2trt_onnx.ModelProto: 1:9: Invalid control characters encountered in text.\n"
           "[01/02/2026-10:00:00] [E] [TRT] ModelImporter.cpp:735: Failed to parse ONNX model from f"
           "ile: net.onnx"),
           ("onnx_parse_error",), _ANY, _LOG),
    Report("timing cache (TensorRT)", "trtexec.log",
           _log("100100", "[01/02/2026-10:00:00] [E] Error[9]: Skipping tactic 0x0 due to exception autotuning: CUD"
           "A error 3 allocating 0-byte buffer: out of memory\n"
           "[01/02/2026-10:00:00] [E] Error[1]: [resizingAllocator.cpp::allocate::62] Error Code 1: "
           "Cuda Runtime (out of memory)"),
           ("out_of_memory",), _ANY, _LOG),
    Report("myelin (TensorRT#3826)", "trtexec.log",
           _log("100001", "[01/02/2026-10:00:00] [E] Error[1]: [myelin/compiler.cpp] MyelinCheckException: autotune"
           "r.cpp:1117: CHECK(tag_bits == 0) failed.\n"
           "[01/02/2026-10:00:00] [E] Error[10]: Error Code: 10: Could not find any implementation f"
           "or node {ForeignNode[/a/Mul.../b/Add]}."),
           ("no_implementation",), _ANY, _LOG),
)  # fmt: skip
