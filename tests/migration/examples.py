# ruff: noqa: E501
"""For each rule of `migrate`: a text it is for, one that looks like it, and the first as `--fix` leaves it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Example:
    """A file with a hit, one with a near miss; `fixed` is the hit mended, None where a person has to."""

    file: str
    hit: str
    miss: str
    fixed: str | None = None


def py(hit: str, miss: str, fixed: str | None = None) -> Example:
    head = "import tensorrt as trt\n"
    return Example("tool.py", head + hit, head + miss, head + fixed if fixed is not None else None)


def cpp(hit: str, miss: str, fixed: str | None = None) -> Example:
    def whole(text: str) -> str:
        return f"#include <NvInfer.h>\nvoid f() {{ {text} }}\n"

    return Example("tool.cpp", whole(hit), whole(miss), whole(fixed) if fixed is not None else None)


def sh(hit: str, miss: str, fixed: str | None = None) -> Example:
    def whole(text: str) -> str:
        return f"#!/bin/sh\n# measure\n{text}\n"

    return Example("run.sh", whole(hit), whole(miss), whole(fixed) if fixed is not None else None)


NVINFER = "[property]\nonnx-file=yolo.onnx\n{}\n"
TRITON = 'optimization {{ execution_accelerators {{ gpu_execution_accelerator : [ {{ name : "tensorrt"\n{} }} ] }} }}\n'


def nvinfer(hit: str, miss: str, fixed: str | None = None) -> Example:
    return Example("infer.txt", NVINFER.format(hit), NVINFER.format(miss), fixed)


BUILD = "trtexec --onnx=m.onnx --saveEngine=m.plan"
EXAMPLES: dict[str, list[Example]] = {
    "inspector-json": [
        py("x = info['Layers'][0]['Inputs'][0]['Format/Datatype']\n", "x = info['Layers'][0]['Inputs'][0]['Format']\n"),
        py("x = json.loads(inspector.get_engine_information(f))['Bindings']\n", "x = shader['Bindings']\n"),
    ],
    "plugin-factory": [
        cpp("r->deserializeCudaEngine(p, n, nullptr);", "r->deserializeCudaEngine(p, n);", "r->deserializeCudaEngine(p, n);"),
    ],
    "wrapper-precision": [
        Example("tool.py", "YOLO('a.pt').export(format='engine', half=True)\n", "YOLO('a.pt').export(format='onnx', half=True)\n"),
        Example("cfg.py", "c = dict(type='tensorrt', common=dict(fp16_mode=True))\n", "c = dict(type='tensorrt', common=dict(fp16_mode=False))\n"),
        sh("yolo export model=a.pt format=engine int8=True", "yolo export model=a.pt format=engine half=False"),
        Example("holo.yaml", 'backend: "trt"\nenable_fp16: true\n', 'backend: "trt"\nenable_fp16: false\n'),
    ],
    "fp16-flag": [
        py("for n in ('FP16', 'TF32'):\n    c.set_flag(getattr(trt.BuilderFlag, n))\n", "for n in ('FP16', 'TF32'):\n    if hasattr(trt.BuilderFlag, n):\n        c.set_flag(getattr(trt.BuilderFlag, n))\n"),
        Example("a.sh", "python3 - << 'E'\nimport tensorrt as trt\nc.set_flag(trt.BuilderFlag.FP16)\nE\n", "cat << 'E'\ntrt.BuilderFlag.FP16\nE\n"),
        Example("a.md", "```python\nc.set_flag(trt.BuilderFlag.FP16)\n```\n", "`trt.BuilderFlag.FP16`\n```python\nc.set_flag(x)\n```\n"),
        Example("a.log", "&&&& RUNNING TensorRT.trtexec [TensorRT v8601] # trtexec --onnx=a.onnx --fp16\n", "[I] trtexec --fp16\n"),
        Example("tox.ini", "[testenv]\ncommands = trtexec --onnx=a.onnx --fp16\n", "[testenv]\ncommands = pytest --fp16\n"),
        py("config.set_flag(trt.BuilderFlag.FP16)\n", "x = trt.float16\n"),
        py("from tensorrt import BuilderFlag as F\nconfig.set_flag(F.FP16)\n", "class F:\n    FP16 = 1\nprint(F.FP16)\n"),
        cpp("config->setFlag(nvinfer1::BuilderFlag::kFP16);", "config->setFlag(nvinfer1::BuilderFlag::kTF32);"),
        sh(
            f"{BUILD} --fp16 --skipInference",
            "# trtexec --onnx=m.onnx --fp16\necho 'trtexec --fp16'",
            "trt-engine cast m.onnx --to fp16 -o m.fp16.onnx && "
            "trtexec --onnx=m.fp16.onnx --saveEngine=m.plan --skipInference",
        ),
        sh(
            "polygraphy convert m.onnx --fp16 -o m.plan",
            "polygraphy convert m.onnx --tf32 -o m.plan",
            "trt-engine cast m.onnx --to fp16 -o m.fp16.onnx && polygraphy convert m.fp16.onnx -o m.plan",
        ),
        Example(
            "Dockerfile",
            "FROM base\nRUN apt-get update && \\\n    trtexec --onnx=/m.onnx --fp16 \\\n      --saveEngine=/m.plan\n",
            'FROM base\nCMD ["trtexec", "--onnx=/m.onnx", "--skipInference"]\n',
            "FROM base\nRUN apt-get update && \\\n    trt-engine cast /m.onnx --to fp16 -o /m.fp16.onnx && "
            "trtexec --onnx=/m.fp16.onnx \\\n      --saveEngine=/m.plan\n",
        ),
        Example("Dockerfile", 'CMD ["trtexec", "--onnx=m.onnx", "--fp16", "--skipInference"]\n', "RUN pip install fp16\n"),
        Example(
            ".github/workflows/ci.yml",
            "jobs:\n  a:\n    steps:\n      - run: trtexec --onnx=m.onnx --fp16 --saveEngine=p # build\n",
            "jobs:\n  a:\n    steps:\n      - run: make trtexec\n",
            "jobs:\n  a:\n    steps:\n      - run: trt-engine cast m.onnx --to fp16 -o m.fp16.onnx && "
            "trtexec --onnx=m.fp16.onnx --saveEngine=p # build\n",
        ),
        Example(
            "Makefile",
            "m.plan: m.onnx\n\t@trtexec --onnx=m.onnx --fp16 --saveEngine=m.plan\n",
            "trtexec: ; make --fp16\n",
            "m.plan: m.onnx\n\t@trt-engine cast m.onnx --to fp16 -o m.fp16.onnx && "
            "trtexec --onnx=m.fp16.onnx --saveEngine=m.plan\n",
        ),
        py('subprocess.run(["trtexec", f"--onnx={m}", "--fp16", "--skipInference"])\n', 'print("run trtexec --fp16")\n'),
        Example(
            "loader.py",
            "from polygraphy.backend.trt import CreateConfig\nc = CreateConfig(fp16=True)\n",
            "from polygraphy.backend.trt import CreateConfig\nc = CreateConfig(fp16=False)\nmine(fp16=True)\n",
        ),
    ],
    "bf16-flag": [
        py("config.set_flag(trt.BuilderFlag.BF16)\n", "x = trt.bfloat16\n"),
        sh(
            "TRT=1 trtexec --onnx=m.onnx --bf16 --saveEngine=p",
            "trtexec --onnx=bf16.onnx --saveEngine=--bf16.plan",
            "trt-engine cast m.onnx --to bf16 -o m.bf16.onnx && TRT=1 trtexec --onnx=m.bf16.onnx --saveEngine=p",
        ),
    ],
    "int8-flag": [
        py("config.set_flag(trt.BuilderFlag.INT8)\n", "x = trt.int8\n"),
        sh(f"{BUILD} --int8 --skipInference", "trt-engine build m.onnx --int8"),
    ],
    "fp8-flag": [cpp("c->setFlag(BuilderFlag::kFP8);", "auto t = DataType::kFP8;")],
    "int4-flag": [py("config.set_flag(trt.BuilderFlag.INT4)\n", "x = trt.DataType.INT4\ny = Kind.INT4\n")],
    "fp4-flag": [py("config.set_flag(getattr(trt.BuilderFlag, 'FP4'))\n", "getattr(trt.BuilderFlag, 'FP4', None)\n")],
    "best-flag": [sh(f"{BUILD} --best --skipInference", "trtexec --onnx=best.onnx --skipInference")],
    "precision-constraints": [
        py("config.set_flag(trt.BuilderFlag.OBEY_PRECISION_CONSTRAINTS)\n", "config.set_flag(trt.BuilderFlag.DEBUG)\n"),
        sh(f"{BUILD} --layerPrecisions=a:fp32 --skipInference", f"{BUILD} --layerDeviceTypes=a:GPU --skipInference"),
    ],
    "layer-precision": [
        py(
            "def f(network: trt.INetworkDefinition):\n    for layer in network:\n        layer.precision = trt.float16\n",
            "def f(network: trt.INetworkDefinition):\n    for layer in network:\n        layer.name = 'x'\nm.precision = 3\n",
        ),
        cpp("layer->setOutputType(0, t);", "plugin->setOutputType(0, t);"),
    ],
    "tensor-type": [
        py(
            "n = trt.Builder(g).create_network(0)\nn.get_output(0).dtype = trt.float16\n",
            "n = trt.Builder(g).create_network(0)\nx = n.get_output(0).dtype\narray.dtype = float\n",
        ),
        cpp("network->getOutput(0)->setType(t);", "field->setType(t);"),
    ],
    "int8-calibrator": [
        py("class C(trt.IInt8EntropyCalibrator2):\n    pass\n", "class C(Int8EntropyCalibrator2):\n    pass\n"),
        py("from tensorrt import IInt8MinMaxCalibrator as C\n", "from calib import IInt8MinMaxCalibrator as C\n"),
        cpp("config->setInt8Calibrator(c);", "config->setProfileStream(c);"),
        sh(f"{BUILD} --calib=c.bin --skipInference", f"{BUILD} --skipInference --calibrate"),
    ],
    "calibration-profile": [
        py("config.set_calibration_profile(p)\n", "config.add_optimization_profile(p)\n"),
        sh(f"{BUILD} --optShapesCalib=x:1 --skipInference", f"{BUILD} --optShapes=x:1 --skipInference"),
    ],
    "quantization-flag": [py("config.set_quantization_flag(f)\n", "config.set_preview_feature(f, True)\n")],
    "dynamic-range": [
        py(
            "n = trt.Builder(g).create_network(0)\nn.get_input(0).set_dynamic_range(-1, 1)\n",
            "x = scale.dynamic_range\n",
        ),
        cpp("tensor->resetDynamicRange();", "tensor->reset();"),
    ],
    "algorithm-selector": [
        py("class S(trt.IAlgorithmSelector):\n    pass\n", "class S(trt.IProfiler):\n    pass\n"),
        sh("polygraphy convert m.onnx --load-tactics t.json -o p", "polygraphy convert m.onnx --load-timing-cache t -o p"),
    ],
    "tactic-source": [py("s = 1 << int(trt.TacticSource.CUDNN)\n", "s = 1 << int(trt.TacticSource.JIT_CONVOLUTIONS)\n")],
    "platform-has-fast": [
        py("if builder.platform_has_fast_fp16:\n    pass\n", "if builder.num_DLA_cores:\n    pass\n"),
        py(
            "ok = trt.Builder(g).platform_has_fast_int8\n",
            "if hasattr(builder, 'platform_has_fast_int8'):\n    x = builder.platform_has_fast_int8\n",
        ),
    ],
    "explicit-batch": [
        py(
            "n = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.EXPLICIT_BATCH))  # needed\n",
            "n = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))\n",
            "n = builder.create_network(0)  # needed\n",
        ),
        cpp(
            "auto b = 1U << static_cast<uint32_t>(nvinfer1::NetworkDefinitionCreationFlag::kEXPLICIT_BATCH);",
            "auto b = 1U << static_cast<uint32_t>(nvinfer1::NetworkDefinitionCreationFlag::kSTRONGLY_TYPED);",
            "auto b = 0U;",
        ),
    ],
    "weightless": [
        py(
            "config.set_flag(trt.BuilderFlag.WEIGHTLESS)\n", "config.set_flag(trt.BuilderFlag.STRIP_PLAN)\n",
            "config.set_flag(trt.BuilderFlag.STRIP_PLAN)\n",
        ),
        sh(f"{BUILD} --weightless", f"{BUILD} --stripWeights", f"{BUILD} --stripWeights"),
    ],
    "device-memory-size": [
        py(
            "n = engine.get_device_memory_size_for_profile(1)\n", "n = engine.get_device_memory_size_for_profile_v2(1)\n",
            "n = engine.get_device_memory_size_for_profile_v2(1)\n",
        ),
        py("n = self.engine.device_memory_size\n", "n = gpu.device_memory_size\n", "n = self.engine.device_memory_size_v2\n"),
        cpp(
            "ICudaEngine* e = g(); auto n = e->getDeviceMemorySize();", "auto n = pool->getDeviceMemorySize();",
            "ICudaEngine* e = g(); auto n = e->getDeviceMemorySizeV2();",
        ),
    ],
    "context-without-device-memory": [
        py(
            "c = engine.create_execution_context_without_device_memory()\n", "c = engine.create_execution_context()\n",
            "c = engine.create_execution_context(trt.ExecutionContextAllocationStrategy.USER_MANAGED)\n",
        ),
        cpp(
            "auto c = engine->createExecutionContextWithoutDeviceMemory();", "auto c = engine->createExecutionContext();",
            "auto c = engine->createExecutionContext(nvinfer1::ExecutionContextAllocationStrategy::kUSER_MANAGED);",
        ),
    ],
    "weight-streaming-budget": [
        py("engine.weight_streaming_budget = 0\n", "engine.weight_streaming_budget_v2 = 0\n"),
    ],
    "implicit-batch-query": [py("assert not engine.has_implicit_batch_dimension\n", "assert engine.refittable\n")],
    "shape-inputs-specified": [py("context.all_shape_inputs_specified\n", "context.all_binding_shapes_specified\n")],
    "stream-reader": [py("class R(trt.IStreamReader):\n    pass\n", "class R(trt.IStreamReaderV2):\n    pass\n")],
    "parser-supports-model": [py("parser.supports_model(data)\n", "parser.supports_model_v2(data)\n")],
    "parse-with-weight-descriptors": [py("parser.parse_with_weight_descriptors(d)\n", "parser.parse(d)\n")],
    "plugin-creator": [
        py(
            "r = trt.get_plugin_registry()\nc = r.get_plugin_creator('NMS', '1', '')\n",
            "r = trt.get_plugin_registry()\nc = r.get_creator('NMS', '1', '')\n",
            "r = trt.get_plugin_registry()\nc = r.get_creator('NMS', '1', '')\n",
        ),
        cpp('auto c = getPluginRegistry()->getPluginCreator("N", "1");', 'auto c = getPluginRegistry()->getCreator("N", "1");'),
    ],
    "preview-feature": [
        py("f = trt.PreviewFeature.PROFILE_SHARING_0806\n", "f = trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03\n"),
    ],
    "profile-values-32bit": [
        cpp("IOptimizationProfile* p = g(); p->setShapeValues(n, s, v, 1);", "p->setShapeValuesV2(n, s, v, 1);"),
    ],
    "plugin-broadcast": [
        Example(
            "plugin.h",
            "#include <NvInfer.h>\nstruct P : IPluginV2Ext { bool canBroadcastInputAcrossBatch(int i) const noexcept override; };\n",
            "#include <NvInfer.h>\nstruct P : IPluginV2Ext { bool supportsFormat(int i) const noexcept override; };\n",
        ),
    ],
    "shipped-plugin": [
        py("c = registry.get_creator('BatchedNMS_TRT', '1', '')\n", "name = 'BatchedNMS_TRT'\n"),
        cpp('auto c = getPluginRegistry()->getCreator("Clip_TRT", "1");', 'auto c = std::string("Clip_TRT");'),
    ],
    "network-flag-literal": [
        py("n = builder.create_network(1 << 1)\n", "n = builder.create_network(1 << 0)\n"),
        cpp("auto n = builder->createNetworkV2(2);", "auto n = builder->createNetworkV2(0);"),
    ],
    "quantize-output-type": [
        py("network.add_quantize(input=x, scale=s)\n", "network.add_quantize(x, scale=s, output_type=trt.int8)\n"),
        py("q = network.add_quantize(x, scale)\n", "q = network.add_quantize(x, scale, trt.int8)\n"),
        cpp("auto q = network->addQuantize(*x, *s);", "auto q = network->addQuantize(*x, *s, DataType::kINT8);"),
    ],
    "trtexec-no-effect": [
        sh(
            f"{BUILD} --stronglyTyped \\\n  --separateProfileRun --noCudaGraph", f"{BUILD} --skipInference",
            f"{BUILD} --noCudaGraph",
        ),
        sh("trtexec --loadEngine=p --useCudaGraph --useSpinWait --noDataTransfers", "trtexec --loadEngine=p --noSpinWait"),
    ],
    "trtexec-defaults": [
        sh(
            "trtexec --loadEngine=p --useCudaGraph --iterations=100 | tee log",
            "trtexec --loadEngine=p --useCudaGraph --useSpinWait --noDataTransfers\n"
            "trtexec --onnx=m.onnx --saveEngine=p",
            "trtexec --loadEngine=p --iterations=100 --noSpinWait --includeDataTransfers | tee log",
        ),
    ],
    "trtexec-io-formats": [
        sh(f"{BUILD} --inputIOFormats=fp16:chw", f"{BUILD} --inputIOFormats=chw"),
        sh(f"{BUILD} --outputIOFormats=fp32:chw,fp32:hwc", f"{BUILD} --outputIOFormats=chw", f"{BUILD} --outputIOFormats=chw,hwc"),
    ],
    "trtexec-value": [
        sh(
            f"{BUILD} --tacticSources=-CUDNN,+EDGE_MASK_CONVOLUTIONS", f"{BUILD} --tacticSources=-JIT_CONVOLUTIONS",
            f"{BUILD} --tacticSources=+EDGE_MASK_CONVOLUTIONS",
        ),
        sh(f"{BUILD} --preview=+profileSharing0806 --verbose", f"{BUILD} --preview=+aliasedPluginIO1003", f"{BUILD} --verbose"),
    ],
    "trtexec-restricted": [sh(f"{BUILD} --restricted", f"{BUILD} --safe")],
    "ort-precision-option": [
        Example("run.py", "options = {'trt_fp16_enable': True}\n", "options = {'trt_engine_cache_enable': True}\n"),
    ],
    "deepstream-network-mode": [nvinfer("network-mode=2", "network-mode=0\n# network-mode=2")],
    "deepstream-calibration": [nvinfer("int8-calib-file=calib.table", "labelfile-path=labels.txt")],
    "deepstream-layer-precision": [nvinfer("layer-device-precision=a:fp32:gpu", "layer-names=a")],
    "triton-precision-mode": [
        Example(
            "config.pbtxt", TRITON.format('parameters { key: "precision_mode" value: "FP16" }'),
            TRITON.format('parameters { key: "precision_mode" value: "FP32" }\n# key: "precision_mode" value: "FP16"'),
        ),
    ],
    "requirement-unpinned": [
        Example("requirements.txt", "numpy\ntensorrt>=8.6\n", "tensorrt>=11,<12\ntensorrt-llm\n"),
        Example("pyproject.toml", 'dependencies = ["tensorrt"]\n', 'name = "tensorrt"\nmodule = ["tensorrt.*"]\n'),
    ],
    "requirement-release": [
        Example("requirements-gpu.txt", "tensorrt-cu12==10.3.0  # tested\n", "tensorrt-cu12==11.0.0\n# tensorrt==8.6\n"),
        Example("setup.py", "setup(install_requires=['tensorrt<11', 'x'])\n", "'tensorrt<11' if old else None\n"),
    ],
    "requirement-name": [
        Example("requirements.txt", "nvidia-tensorrt\n", "nvidia-tensorrt-tools\ntensorrt>=11\n", "tensorrt\n"),
    ],
    "image-release": [
        Example("Dockerfile", "FROM nvcr.io/nvidia/tensorrt:24.01-py3\n", "FROM nvcr.io/nvidia/tensorrt:26.07-py3\n"),
    ],
    "library-release": [
        Example("CMakeLists.txt", "find_library(L nvinfer_10)\n", "find_library(L nvinfer nvinfer_11 my_nvinfer_10x)\n"),
        Example("Dockerfile", "RUN apt-get install -y libnvinfer8=8.6.1\n", "RUN apt-get install -y libnvinfer-dev\n"),
    ],
    "parser-libraries": [
        Example(
            "CMakeLists.txt", "target_link_libraries(a nvinfer nvparsers # old\n  cudart)\n",
            "target_link_libraries(a nvinfer nvonnxparser)\n# nvparsers\n",
            "target_link_libraries(a nvinfer # old\n  cudart)\n",
        ),
        Example("Makefile", "LIBS = -lnvinfer -lnvparsers\n", "LIBS = -lnvonnxparser\n", "LIBS = -lnvinfer\n"),
        Example(
            "Makefile", "LIBS = -lnvinfer \\\n  -lnvparsers\n",
            "ifeq ($(shell ldconfig -p | grep -q libnvparsers && echo 1), 1)\n  LIBS += -lnvparsers\nendif\n",
            "LIBS = -lnvinfer \\\n\n",
        ),
    ],
    "binding-index": [
        py(
            "for i in range(engine.num_bindings):\n    print(engine.get_binding_name(i))  # its name\n",
            "n = engine.num_io_tensors\n",
            "for i in range(engine.num_io_tensors):\n    print(engine.get_tensor_name(i))  # its name\n",
        ),
        py(
            "class R:\n    def __init__(self, e: trt.ICudaEngine):\n        self.e = e\n    def f(self):\n"
            "        return self.e.is_shape_binding(0)\n",
            "class R:\n    def get_binding_shape(self, i): ...\n    def f(self, other):\n"
            "        return self.get_binding_shape(0), other.get_binding_shape(1)\n",
        ),
        cpp(
            "int n = engine->getNbBindings();", "int n = engine->getNbIOTensors();", "int n = engine->getNbIOTensors();",
        ),
    ],
    "context-binding": [
        py("context.set_binding_shape(0, shape)\n", "context.set_input_shape('x', shape)\n"),
        cpp("context->setBindingDimensions(0, d);", "context->setInputShape(\"x\", d);"),
    ],
    "execute-by-index": [
        py(
            "engine = runtime.deserialize_cuda_engine(d)\nc = engine.create_execution_context()\nc.execute(1, b)\n",
            "cursor.execute('select 1')\ncontext.execute_v2(b)\n",
        ),
        cpp("context->enqueueV2(b, s, nullptr);", "context->enqueueV3(s); plugin->enqueue(a, b, c, d, e, f);"),
    ],
    "max-batch-size": [
        py("builder.max_batch_size = 8\n", "args.max_batch_size = 8\nserver.max_batch_size = 8\n"),
        sh(f"{BUILD} --maxBatch=8", f"{BUILD} --maxShapes=x:8"),
    ],
    "build-engine": [
        py(
            "e = trt.Builder(g).build_engine(network, config)\n", "e = mine.build_engine(network, config)\n",
            "e = trt.Builder(g).build_engine_with_config(network, config)\n",
        ),
    ],
    "workspace-size": [
        py(
            "config.max_workspace_size = 1 << 30  # 1 GiB\n", "args.max_workspace_size = 1 << 30\n",
            "config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, 1 << 30)  # 1 GiB\n",
        ),
        cpp(
            "config->setMaxWorkspaceSize(1 << 20);", "config->setMemoryPoolLimit(t, 1);",
            "config->setMemoryPoolLimit(nvinfer1::MemoryPoolType::kWORKSPACE, 1 << 20);",
        ),
        sh(f"{BUILD} --workspace=4096", f"{BUILD} --memPoolSize=workspace:4096", f"{BUILD} --memPoolSize=workspace:4096"),
    ],
    "timing-iterations": [
        py("config.min_timing_iterations = 2\n", "config.avg_timing_iterations = 2\n"),
        sh(f"{BUILD} --minTiming=2 --verbose", f"{BUILD} --avgTiming=2", f"{BUILD} --verbose"),
    ],
    "strict-types": [py("config.set_flag(trt.BuilderFlag.STRICT_TYPES)\n", "x = 'STRICT_TYPES'\n")],
    "tactic-heuristic": [sh(f"{BUILD} --heuristic", f"{BUILD} --builderOptimizationLevel=2", BUILD)],
    "caffe-uff-parser": [
        py("p = trt.UffParser()\n", "p = trt.OnnxParser(n, g)\n"),
        cpp("auto p = nvcaffeparser1::createCaffeParser();", "auto p = nvonnxparser::createParser(*n, g);"),
        nvinfer("proto-file=a.prototxt\nmodel-file=a.caffemodel", "model-file=yolo.wts"),
    ],
    "fully-connected": [py("network.add_fully_connected(x, 10, k, b)\n", "network.add_matrix_multiply(a, o, b, o)\n")],
    "rnn-layer": [cpp("auto r = nvinfer1::RNNOperation::kLSTM;", "auto r = network->addLoop();")],
    "nd-layers": [
        py(
            "conv = network.add_convolution(x, 8, (3, 3), k)\nconv.stride = (2, 2)\n",
            "conv = network.add_convolution_nd(x, 8, (3, 3), k)\nconv.stride_nd = (2, 2)\nmodule.stride = (2, 2)\n",
            "conv = network.add_convolution_nd(x, 8, (3, 3), k)\nconv.stride_nd = (2, 2)\n",
        ),
        cpp(
            "auto c = network->addConvolution(*x, 8, DimsHW{3, 3}, k, b); c->setStride(DimsHW{2, 2});",
            "auto c = mine->addConvolution(*x); image.setStride(2);",
            "auto c = network->addConvolutionNd(*x, 8, DimsHW{3, 3}, k, b); c->setStrideNd(DimsHW{2, 2});",
        ),
    ],
    "resize-mode": [
        py("m = trt.ResizeMode.LINEAR\n", "m = cv2.ResizeMode.LINEAR\n", "m = trt.InterpolationMode.LINEAR\n"),
        cpp(
            "l->setResizeMode(ResizeMode::kLINEAR);", "l->setResizeMode(InterpolationMode::kLINEAR);",
            "l->setResizeMode(InterpolationMode::kLINEAR);",
        ),
    ],
    "slice-mode": [
        py(
            "m = trt.SliceMode.WRAP\nd = trt.SampleMode.DEFAULT\n", "m = trt.SampleMode.WRAP\n",
            "m = trt.SampleMode.WRAP\nd = trt.SampleMode.STRICT_BOUNDS\n",
        ),
    ],
    "resize-align-corners": [
        cpp("auto l = network->addResize(*x); l->setAlignCorners(true);", "image->setAlignCorners(true);"),
    ],
    "explicit-precision": [
        py("f = trt.NetworkDefinitionCreationFlag.EXPLICIT_PRECISION\n", "f = EXPLICIT_PRECISION\n"),
        sh(f"{BUILD} --explicitBatch", BUILD, BUILD),
    ],
    "preview-feature-8": [
        py("f = trt.PreviewFeature.FASTER_DYNAMIC_SHAPES_0805\n", "f = trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03\n"),
    ],
    "profiling-verbosity": [
        py(
            "config.profiling_verbosity = trt.ProfilingVerbosity.VERBOSE\n",
            "config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED\n",
            "config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED\n",
        ),
        sh(f"{BUILD} --nvtxMode=verbose", f"{BUILD} --profilingVerbosity=detailed", f"{BUILD} --profilingVerbosity=detailed"),
    ],
    "engine-capability": [
        py(
            "c = trt.EngineCapability.SAFE_GPU\n", "c = trt.EngineCapability.SAFETY\n", "c = trt.EngineCapability.SAFETY\n",
        ),
    ],
    "caffe-padding": [py("m = trt.PaddingMode.CAFFE_ROUND_UP\n", "m = trt.PaddingMode.SAME_UPPER\n")],
    "destroy-method": [
        cpp("engine->destroy();", "stream->destroy(); cache.destroy();", "delete engine;"),
        cpp("nvinfer1::IHostMemory* plan = g(); f(plan->destroy());", "plugin->destroy();"),
    ],
    "allocator-free": [cpp("nvinfer1::IGpuAllocator* a = g(); a->free(p);", "std::free(p); pool->free(p);")],
    "active-profile": [
        py("context.active_optimization_profile = 1\n", "print(context.active_optimization_profile)\n"),
        cpp("context->setOptimizationProfile(1);", "context->setOptimizationProfileAsync(1, s);"),
    ],
    "dims32": [cpp("nvinfer1::Dims32 d;", "nvinfer1::Dims d;")],
    "trtexec-build-only": [sh(f"{BUILD} --buildOnly", f"{BUILD} --skipInference", f"{BUILD} --skipInference")],
    "trtexec-pool-unit": [
        sh(
            f"{BUILD} --memPoolSize=workspace:1024MiB", f"{BUILD} --memPoolSize=workspace:1G",
            f"{BUILD} --memPoolSize=workspace:1024",
        ),
        sh(f"{BUILD} --memPoolSize=workspace:4GiB", f"{BUILD} --memPoolSize=workspace:4096"),
    ],
    "deepstream-implicit-batch": [
        nvinfer("force-implicit-batch-dim=1\ninterval=0", "force-implicit-batch-dim=0", NVINFER.format("interval=0")),
    ],
}  # fmt: skip
