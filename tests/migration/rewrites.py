# ruff: noqa: E501
"""The same construct written in many ways: each form must give the finding that the plainest one gives."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePath

from trt_engine.migration.files import Kind, file_kind
from trt_engine.migration.migrate import scan_source
from trt_engine.migration.rules import RuleSet
from trt_engine.migration.source import Source

__all__ = ["Rewrite", "finds", "rewrites", "sample"]


@dataclass(frozen=True)
class Rewrite:
    """A file that has a construct of a rule in some form."""

    rule: str
    name: str
    form: str
    file: str
    text: str


def _forms(text: str) -> dict[str, str]:
    """Forms by their title, which stands on a line `== title`."""
    parts = text.strip("\n").split("== ")[1:]
    return {part.partition("\n")[0].strip(): part.partition("\n")[2] for part in parts}


PYTHON_NAMES = _forms("""
== plain
import tensorrt as trt
use(trt.OWNER.MEMBER)
== whole module
import tensorrt
use(tensorrt.OWNER.MEMBER)
== from import
from tensorrt import OWNER
use(OWNER.MEMBER)
== from import under another name
from tensorrt import OWNER as Q
use(Q.MEMBER)
== inner module
import tensorrt.tensorrt as trt
use(trt.OWNER.MEMBER)
== bindings
from tensorrt_bindings import OWNER as Q
use(Q.MEMBER)
== class in a variable
import tensorrt as trt
Q = trt.OWNER
use(Q.MEMBER)
== module in a variable
import tensorrt
backend = tensorrt
use(backend.OWNER.MEMBER)
== module in a field
import tensorrt
class Backend:
    def __init__(self):
        self.trt = tensorrt
        self.lib = tensorrt
    def run(self):
        use(self.lib.OWNER.MEMBER)
== class in a field
import tensorrt as trt
class Backend:
    Q = trt.OWNER
    def run(self):
        use(self.Q.MEMBER)
== getattr
import tensorrt as trt
use(getattr(trt.OWNER, "MEMBER"))
== getattr of getattr
import tensorrt as trt
use(getattr(getattr(trt, "OWNER"), "MEMBER"))
== getattr by a variable
import tensorrt as trt
NAME = "MEMBER"
def run():
    use(getattr(trt.OWNER, NAME))
== getattr by a field
import tensorrt as trt
class Backend:
    name = "MEMBER"
    def run(self):
        use(getattr(trt.OWNER, self.name))
== getattr by a dictionary
import tensorrt as trt
NAMES = {"a": "MEMBER", "b": "TF32"}
def run(kind):
    use(getattr(trt.OWNER, NAMES[kind]))
== getattr by get of a dictionary
import tensorrt as trt
NAMES = dict(a="MEMBER", b="TF32")
def run(kind):
    use(getattr(trt.OWNER, NAMES.get(kind)))
== getattr by a loop
import tensorrt as trt
for name in ("TF32", "MEMBER"):
    use(getattr(trt.OWNER, name))
== getattr by a loop over a list
import tensorrt as trt
NAMES = ["TF32", "MEMBER"]
for name in NAMES:
    use(getattr(trt.OWNER, name))
== getattr by a comprehension
import tensorrt as trt
found = [getattr(trt.OWNER, one) for one in ["MEMBER", "TF32"]]
== getattr by a choice
import tensorrt as trt
def run(low):
    use(getattr(trt.OWNER, "MEMBER" if low else "TF32"))
== getattr by a default
import tensorrt as trt
def run(name="MEMBER"):
    use(getattr(trt.OWNER, name))
== members
import tensorrt as trt
use(trt.OWNER.__members__["MEMBER"])
== dictionary of the module
import tensorrt as trt
use(vars(trt)["OWNER"].MEMBER)
== import by name
import importlib
lib = importlib.import_module("tensorrt")
use(lib.OWNER.MEMBER)
== import in a function
def run():
    import tensorrt as engine_lib
    use(engine_lib.OWNER.MEMBER)
== import that may fail
try:
    import tensorrt as trt
except ImportError:
    trt = None
def run():
    use(trt.OWNER.MEMBER)
== import of a module of ours
from .compat import trt
use(trt.OWNER.MEMBER)
== value of a dictionary
import tensorrt as trt
TABLE = {"a": trt.OWNER.MEMBER}
== default of an argument
import tensorrt as trt
def run(flag=trt.OWNER.MEMBER):
    pass
== lambda
import tensorrt as trt
run = lambda: use(trt.OWNER.MEMBER)
== formatted text
import tensorrt as trt
print(f"{trt.OWNER.MEMBER}")
== several lines
import tensorrt as trt
use(
    trt
    .OWNER
    .MEMBER
)
== shifted
import tensorrt as trt
mask = 0
mask |= (1 << int(trt.OWNER.MEMBER))
== decorated
import tensorrt as trt
@register(trt.OWNER.MEMBER)
def run():
    pass
== keyword
import tensorrt as trt
use(flag=trt.OWNER.MEMBER)
== match
import tensorrt as trt
def run(x):
    match x:
        case 1:
            use(trt.OWNER.MEMBER)
== walrus
import tensorrt as trt
if (flag := trt.OWNER.MEMBER):
    use(flag)
""")
"""Members of enums: OWNER.MEMBER."""

PYTHON_CLASSES = _forms("""
== plain
import tensorrt as trt
use(trt.OWNER)
== from import
from tensorrt import OWNER
== from import under another name
from tensorrt import OWNER as Q
use(Q)
== getattr
import tensorrt as trt
use(getattr(trt, "OWNER"))
== getattr by a variable
import tensorrt as trt
KIND = "OWNER"
use(getattr(trt, KIND))
== getattr by a dictionary
import tensorrt as trt
KINDS = {"a": "OWNER"}
use(getattr(trt, KINDS["a"]))
== base class
import tensorrt as trt
class Mine(trt.OWNER):
    pass
== base class in a function
def make():
    import tensorrt as trt
    class Mine(trt.OWNER):
        pass
    return Mine
== annotation
import tensorrt as trt
def run(x: trt.OWNER) -> None: ...
== annotation in quotes
import tensorrt as trt
def run(x: "trt.OWNER") -> None: ...
== union
import tensorrt as trt
def run(x: trt.OWNER | None = None) -> None: ...
== isinstance
import tensorrt as trt
def run(x):
    return isinstance(x, (trt.OWNER, int))
== variable
import tensorrt as trt
Base = trt.OWNER
== dictionary of the module
import tensorrt as trt
use(trt.__dict__["OWNER"])
== guarded import
try:
    import tensorrt as trt
    Base = trt.OWNER
except ImportError:
    Base = object
""")

PYTHON_MEMBERS = _forms("""
== made by a call
import tensorrt as trt
def run(thing):
    qq = thing.MAKE
    qq.MEMBER
== annotation
import tensorrt as trt
def run(qq: trt.OWNER):
    qq.MEMBER
== annotation in quotes
import tensorrt as trt
def run(qq: "trt.OWNER"):
    qq.MEMBER
== optional
import tensorrt as trt
from typing import Optional
def run(qq: Optional[trt.OWNER] = None):
    qq.MEMBER
== union
import tensorrt as trt
def run(qq: trt.OWNER | None):
    qq.MEMBER
== imported annotation
from tensorrt import OWNER
def run(qq: OWNER):
    qq.MEMBER
== annotated variable
import tensorrt as trt
qq: trt.OWNER = make()
qq.MEMBER
== field of a class
import tensorrt as trt
class Backend:
    qq: trt.OWNER
    def run(self):
        self.qq.MEMBER
== field from an argument
import tensorrt as trt
class Backend:
    def __init__(self, qq: trt.OWNER):
        self.zz = qq
    def run(self):
        self.zz.MEMBER
== field from a call
import tensorrt as trt
class Backend:
    def run(self):
        self.zz.MEMBER
    def start(self, thing):
        self.zz = thing.MAKE
== another name for it
import tensorrt as trt
def run(qq: trt.OWNER):
    zz = qq
    zz.MEMBER
== returned by a function
import tensorrt as trt
def make() -> trt.OWNER: ...
qq = make()
qq.MEMBER
== returned by a function without annotation
import tensorrt as trt
def make(thing):
    made = thing.MAKE
    return made
qq = make(1)
qq.MEMBER
== returned by a method
import tensorrt as trt
class Backend:
    def make(self, thing):
        return thing.MAKE
    def run(self):
        qq = self.make(1)
        qq.MEMBER
== property
import tensorrt as trt
class Backend:
    @property
    def zz(self) -> trt.OWNER: ...
    def run(self):
        self.zz.MEMBER
== isinstance
import tensorrt as trt
def run(qq):
    assert isinstance(qq, trt.OWNER)
    qq.MEMBER
== several at once
import tensorrt as trt
def run(thing):
    n, qq = 1, thing.MAKE
    qq.MEMBER
== with
import tensorrt as trt
def run(thing):
    with thing.MAKE as qq:
        qq.MEMBER
== walrus
import tensorrt as trt
def run(thing):
    if (qq := thing.MAKE) is not None:
        qq.MEMBER
== list
import tensorrt as trt
def run(thing):
    items = [thing.MAKE]
    items[0].MEMBER
== list and loop
import tensorrt as trt
def run(thing):
    items = [thing.MAKE for _ in range(2)]
    for qq in items:
        qq.MEMBER
== annotated list
import tensorrt as trt
def run(items: list[trt.OWNER]):
    for qq in items:
        qq.MEMBER
== dictionary
import tensorrt as trt
def run(thing):
    items = {"a": thing.MAKE}
    items["a"].MEMBER
== getattr
import tensorrt as trt
def run(qq: trt.OWNER):
    getattr(qq, "MEMBER")
== getattr by a variable
import tensorrt as trt
NAME = "MEMBER"
def run(qq: trt.OWNER):
    getattr(qq, NAME)
== setattr
import tensorrt as trt
def run(qq: trt.OWNER, value):
    setattr(qq, "MEMBER", value)
== bound
import tensorrt as trt
def run(qq: trt.OWNER):
    call = qq.MEMBER
    call()
== of the call itself
import tensorrt as trt
def run(thing):
    thing.MAKE.MEMBER
== choice
import tensorrt as trt
def run(thing, qq=None):
    qq = qq if qq else thing.MAKE
    qq.MEMBER
== or
import tensorrt as trt
def run(thing, zz=None):
    qq = zz or thing.MAKE
    qq.MEMBER
== lambda
import tensorrt as trt
def run(qq: trt.OWNER):
    return lambda: qq.MEMBER
== inner function
import tensorrt as trt
def run(qq: trt.OWNER):
    def inner():
        return qq.MEMBER
    return inner
== of the class
import tensorrt as trt
use(trt.OWNER.MEMBER)
== formatted text
import tensorrt as trt
def run(qq: trt.OWNER):
    print(f"{qq.MEMBER}")
""")
"""Members of objects; MAKE is a call that returns an OWNER."""

CPP_NAMES = _forms("""
== plain
auto x = nvinfer1::OWNER::MEMBER;
== using namespace
using namespace nvinfer1;
void f() { use(OWNER::MEMBER); }
== using
using nvinfer1::OWNER;
void f() { use(OWNER::MEMBER); }
== alias of the namespace
namespace trt = nvinfer1;
void f() { use(trt::OWNER::MEMBER); }
== alias of the class
using Q = nvinfer1::OWNER;
void f() { use(Q::MEMBER); }
== typedef
typedef nvinfer1::OWNER Q;
void f() { use(Q::MEMBER); }
== using enum
void f() { using enum nvinfer1::OWNER; use(MEMBER); }
== global
void f() { use(::nvinfer1::OWNER::MEMBER); }
== cast
void f() { uint32_t m = 1U << static_cast<uint32_t>(nvinfer1::OWNER::MEMBER); }
== old cast
void f() { int m = (int)nvinfer1::OWNER::MEMBER; }
== macro
#define WANTED nvinfer1::OWNER::MEMBER
void f() { use(WANTED); }
== macro with an argument
#define ENABLE(c) (c)->set(nvinfer1::OWNER::MEMBER)
== argument of a macro
void f() { CHECK(use(nvinfer1::OWNER::MEMBER)); }
== choice
void f(bool h) { use(h ? nvinfer1::OWNER::MEMBER : other); }
== case
void f(nvinfer1::OWNER x) { switch (x) { case nvinfer1::OWNER::MEMBER: break; } }
== map
static const std::map<std::string, nvinfer1::OWNER> table = {{"a", nvinfer1::OWNER::MEMBER}};
== default of an argument
void f(nvinfer1::OWNER x = nvinfer1::OWNER::MEMBER);
== default of a field
struct S { nvinfer1::OWNER x{nvinfer1::OWNER::MEMBER}; };
== constant
static constexpr auto kWanted = nvinfer1::OWNER::MEMBER;
== template argument
template <nvinfer1::OWNER X> struct T {};
T<nvinfer1::OWNER::MEMBER> t;
== lambda
auto f = [](auto* c) { c->set(nvinfer1::OWNER::MEMBER); };
== several lines
void f() {
  use(nvinfer1::
      OWNER::
      MEMBER);
}
== template
template <typename T> void f(T& c) { c.set(nvinfer1::OWNER::MEMBER); }
""")

CPP_CLASSES = _forms("""
== plain
void f(nvinfer1::OWNER* x);
== using namespace
using namespace nvinfer1;
void f(OWNER* x);
== base class
class Mine : public nvinfer1::OWNER {};
== smart pointer
std::unique_ptr<nvinfer1::OWNER> held;
== vector
std::vector<nvinfer1::OWNER*> held;
== alias
using Q = nvinfer1::OWNER;
== alias of the namespace
namespace trt = nvinfer1;
struct S { trt::OWNER* held; };
== forward declaration
namespace nvinfer1 { class OWNER; }
== cast
void f(void* p) { auto* x = static_cast<nvinfer1::OWNER*>(p); }
== macro
#define BASE nvinfer1::OWNER
""")

CPP_MEMBERS = _forms("""
== pointer
void f(nvinfer1::OWNER* qq) { qq->MEMBER(ARGS); }
== reference
void f(nvinfer1::OWNER& qq) { qq.MEMBER(ARGS); }
== constant reference
void f(const nvinfer1::OWNER& qq) { qq.MEMBER(ARGS); }
== using namespace
using namespace nvinfer1;
void f(OWNER* qq) { qq->MEMBER(ARGS); }
== pointer that is followed
void f(nvinfer1::OWNER* qq) { (*qq).MEMBER(ARGS); }
== unique pointer
void f() { std::unique_ptr<nvinfer1::OWNER> qq = make(); qq->MEMBER(ARGS); }
== shared pointer
std::shared_ptr<nvinfer1::OWNER> qq;
void f() { qq->MEMBER(ARGS); }
== pointer with a deleter
template <typename T> using Held = std::unique_ptr<T, Deleter>;
void f() { Held<nvinfer1::OWNER> qq{make()}; qq->MEMBER(ARGS); }
== get
void f() { std::unique_ptr<nvinfer1::OWNER> qq = make(); qq.get()->MEMBER(ARGS); }
== field
class S { void f(); nvinfer1::OWNER* qq_{nullptr}; };
void S::f() { qq_->MEMBER(ARGS); }
== field of this
class S { void f() { this->qq_->MEMBER(ARGS); } std::unique_ptr<nvinfer1::OWNER> qq_; };
== field of another
struct S { nvinfer1::OWNER* qq; };
void f(S* s) { s->qq->MEMBER(ARGS); }
== alias of the class
using Q = nvinfer1::OWNER;
void f(Q* qq) { qq->MEMBER(ARGS); }
== typedef of a pointer
typedef std::unique_ptr<nvinfer1::OWNER> QPtr;
void f(QPtr& qq) { qq->MEMBER(ARGS); }
== alias of a smart pointer
using QPtr = std::shared_ptr<nvinfer1::OWNER>;
void f() { QPtr qq = make(); qq->MEMBER(ARGS); }
== alias of the namespace
namespace trt = nvinfer1;
void f(trt::OWNER* qq) { qq->MEMBER(ARGS); }
== auto of a cast
void f(void* p) { auto* qq = static_cast<nvinfer1::OWNER*>(p); qq->MEMBER(ARGS); }
== another name for it
void f(nvinfer1::OWNER* zz) { auto* qq = zz; qq->MEMBER(ARGS); }
== auto of a dereference
void f(std::unique_ptr<nvinfer1::OWNER>& zz) { auto& qq = *zz; qq.MEMBER(ARGS); }
== auto of get
void f(std::unique_ptr<nvinfer1::OWNER>& zz) { auto qq = zz.get(); qq->MEMBER(ARGS); }
== function that returns it
nvinfer1::OWNER* make();
void f() { auto qq = make(); qq->MEMBER(ARGS); }
== method that returns it
class S { nvinfer1::OWNER* qq() const; void f() { qq()->MEMBER(ARGS); } };
== vector
void f(std::vector<nvinfer1::OWNER*>& items) { items[0]->MEMBER(ARGS); }
== range loop
void f(std::vector<nvinfer1::OWNER*>& items) { for (auto* qq : items) qq->MEMBER(ARGS); }
== map
std::map<std::string, std::unique_ptr<nvinfer1::OWNER>> items;
void f() { items["a"]->MEMBER(ARGS); items.at("a")->MEMBER(ARGS); }
== argument of a macro
void f(nvinfer1::OWNER* qq) { CHECK(qq->MEMBER(ARGS)); }
== body of a macro
#define RUN(qq) static_cast<nvinfer1::OWNER*>(qq)->MEMBER(ARGS)
== lambda
auto f = [](nvinfer1::OWNER* qq) { return qq->MEMBER(ARGS); };
== captured
void f(nvinfer1::OWNER* qq) { auto g = [&] { return qq->MEMBER(ARGS); }; }
== several lines
void f(nvinfer1::OWNER* qq) {
  qq
      ->MEMBER(ARGS);
}
== condition
void f(nvinfer1::OWNER* qq) { if (auto v = qq->MEMBER(ARGS)) use(v); }
""")

_CPP_HEAD = "#include <NvInfer.h>\n#include <NvOnnxParser.h>\n"

SHELL = {
    "build.sh": _forms("""
== plain
TOOL BASE OPTION
== path
/usr/src/tensorrt/bin/TOOL BASE OPTION
== relative
./bin/TOOL BASE OPTION
== sudo
sudo TOOL BASE OPTION
== environment
CUDA_VISIBLE_DEVICES=0 TOOL BASE OPTION
== timeout
timeout 600 TOOL BASE OPTION
== continued
TOOL BASE \\
  OPTION
== quoted option
TOOL BASE "OPTION"
== after and
cd models && TOOL BASE OPTION
== condition
if TOOL BASE OPTION; then echo built; fi
== negated
! TOOL BASE OPTION || exit 1
== piped
TOOL BASE OPTION 2>&1 | tee build.log
== background
TOOL BASE OPTION &
== substitution
log=$(TOOL BASE OPTION 2>&1)
== backquotes
log=`TOOL BASE OPTION`
== variable
OPTS="OPTION"
TOOL BASE $OPTS
== variable in braces
OPTS='--verbose OPTION'
TOOL BASE ${OPTS}
== appended
OPTS="--verbose"
OPTS="$OPTS OPTION"
TOOL BASE $OPTS
== plus
OPTS=--verbose
OPTS+=" OPTION"
TOOL BASE $OPTS
== array
args=(--verbose OPTION)
TOOL BASE "${args[@]}"
== array over lines
args=(
  BASE  # model
  OPTION
)
TOOL "${args[@]}"
== array appended
args=(BASE)
args+=(OPTION)
TOOL "${args[@]}"
== default
TOOL BASE ${OPTS:-OPTION}
== alternative
TOOL BASE ${LOW:+OPTION}
== path in a variable
BIN=/opt/tensorrt/bin/TOOL
$BIN BASE OPTION
== folder in a variable
ROOT=/opt/tensorrt
${ROOT}/bin/TOOL BASE OPTION
== quoted path in a variable
BIN="${TRT_ROOT}/bin/TOOL"
"$BIN" BASE OPTION
== path by default
BIN=${BIN:-TOOL}
"$BIN" BASE OPTION
== path by which
BIN=$(which TOOL)
$BIN BASE OPTION
== whole command in a variable
CMD="TOOL BASE OPTION"
$CMD
== command that grows
CMD="TOOL BASE"
CMD="$CMD OPTION"
eval $CMD
== command that grows by plus
CMD="TOOL BASE"
CMD+=" OPTION"
eval "$CMD"
== command in an array
cmd=(TOOL BASE)
cmd+=(OPTION)
"${cmd[@]}"
== function
build() { TOOL "$@"; }
build BASE OPTION
== function with its own options
build() {
  local model=$1
  shift
  TOOL --verbose "$@"
}
build m.onnx OPTION
== runner
run() { echo "$@"; "$@"; }
run TOOL BASE OPTION
== alias
alias t=TOOL
t BASE OPTION
== loop
for opt in OPTION; do
  TOOL BASE $opt
done
== positional
set -- BASE OPTION
TOOL "$@"
== case
case $1 in
  low) EXTRA="OPTION" ;;
esac
TOOL BASE $EXTRA
== bash -c
bash -c "TOOL BASE OPTION"
== docker
docker run --rm --gpus all -v "$PWD:/w" image TOOL BASE OPTION
== docker and bash
docker run --rm image bash -c "cd /w && TOOL BASE OPTION"
== docker exec
docker exec box TOOL BASE OPTION
== docker compose
docker compose run --rm builder TOOL BASE OPTION
== ssh
ssh jetson 'cd /w && TOOL BASE OPTION'
== ssh over lines
ssh jetson << EOF
  TOOL BASE OPTION
EOF
== xargs
ls *.onnx | xargs -I{} TOOL BASE OPTION
== find
find . -name '*.onnx' -exec TOOL BASE OPTION \\;
== nohup
nohup TOOL BASE OPTION > log 2>&1 &
== profiler
nsys profile -o report TOOL BASE OPTION
== time
time TOOL BASE OPTION
== numactl
numactl -N 0 TOOL BASE OPTION
== slurm
srun -p gpu --gres=gpu:1 TOOL BASE OPTION
== heredoc
cat > build_one.sh << 'EOF'
TOOL BASE OPTION
EOF
"""),
    "Makefile": _forms("""
== plain
m.plan: m.onnx
\tTOOL BASE OPTION
== silent
m.plan:
\t@TOOL BASE OPTION
== variable
OPTS := OPTION
m.plan:
\tTOOL BASE $(OPTS)
== appended
OPTS = --verbose
OPTS += OPTION
m.plan:
\t$(ENV) TOOL BASE ${OPTS}
== program
BIN ?= /usr/src/tensorrt/bin/TOOL
m.plan:
\t$(BIN) BASE OPTION
== continued
m.plan:
\tTOOL BASE \\
\t\tOPTION
== of one target
low: OPTS += OPTION
low:
\tTOOL BASE $(OPTS)
"""),
    "Dockerfile": _forms("""
== run
RUN TOOL BASE OPTION
== run over lines
RUN apt-get update \\
 && TOOL BASE \\
      OPTION
== list
RUN ["TOOL", "BASE", "OPTION"]
== command
CMD ["TOOL", "BASE", "OPTION"]
== entry point and command
ENTRYPOINT ["TOOL"]
CMD ["BASE", "OPTION"]
== argument
ARG OPTS="OPTION"
RUN TOOL BASE ${OPTS}
== environment
ENV OPTS=OPTION
RUN TOOL BASE $OPTS
== environment without a sign
ENV OPTS OPTION
RUN TOOL BASE $OPTS
== shell
RUN bash -c "TOOL BASE OPTION"
== shell in a list
CMD ["bash", "-c", "TOOL BASE OPTION"]
== heredoc
RUN <<EOF
set -e
TOOL BASE OPTION
EOF
== mount
RUN --mount=type=cache,target=/c TOOL BASE OPTION
"""),
    ".github/workflows/ci.yml": _forms("""
== run
jobs:
  a:
    steps:
      - run: TOOL BASE OPTION
== literal
jobs:
  a:
    steps:
      - name: build
        run: |
          cd models
          TOOL BASE OPTION
== folded
jobs:
  a:
    steps:
      - run: >-
          TOOL BASE
          OPTION
== environment
env:
  OPTS: OPTION
jobs:
  a:
    steps:
      - run: TOOL BASE $OPTS
== environment of GitHub
env:
  OPTS: "OPTION"
jobs:
  a:
    steps:
      - run: TOOL BASE ${{ env.OPTS }}
== matrix
jobs:
  a:
    strategy:
      matrix:
        opts: ["--verbose", "OPTION"]
    steps:
      - run: TOOL BASE ${{ matrix.opts }}
== matrix over lines
jobs:
  a:
    strategy:
      matrix:
        include:
          - name: low
            opts: OPTION
    steps:
      - run: TOOL BASE ${{ matrix.opts }}
== matrix list over lines
jobs:
  a:
    strategy:
      matrix:
        opts:
          - "--verbose"
          - "OPTION"
    steps:
      - run: TOOL BASE ${{ matrix.opts }}
== input
on:
  workflow_dispatch:
    inputs:
      opts:
        description: more
        default: "OPTION"
jobs:
  a:
    steps:
      - run: TOOL BASE ${{ inputs.opts }}
== script
build:
  script:
    - cd models
    - TOOL BASE OPTION
== script quoted
build:
  script:
    - "TOOL BASE OPTION"
== compose
services:
  build:
    image: x
    command: TOOL BASE OPTION
== compose list
services:
  build:
    command: ["TOOL", "BASE", "OPTION"]
== compose list over lines
services:
  build:
    command:
      - TOOL
      - BASE
      - OPTION
== compose shell
services:
  build:
    command: bash -c "TOOL BASE OPTION"
== kubernetes
spec:
  containers:
    - name: b
      command: ["TOOL"]
      args: ["BASE", "OPTION"]
== kubernetes over lines
spec:
  containers:
    - name: b
      command:
        - TOOL
      args:
        - BASE
        - OPTION
== kubernetes shell
spec:
  containers:
    - name: b
      command: ["/bin/sh", "-c"]
      args:
        - |
          TOOL BASE OPTION
== task
tasks:
  build:
    cmds:
      - TOOL BASE OPTION
== pipeline
steps:
  - script: TOOL BASE OPTION
    displayName: build
== dvc
stages:
  plan:
    cmd: TOOL BASE OPTION
"""),
    "CMakeLists.txt": _forms("""
== command
add_custom_command(OUTPUT m.plan COMMAND TOOL BASE OPTION DEPENDS m.onnx)
== command over lines
add_custom_command(
  OUTPUT m.plan
  COMMAND TOOL
    BASE
    OPTION
  VERBATIM)
== process
execute_process(COMMAND TOOL BASE OPTION)
== variable
set(OPTS OPTION)
add_custom_target(plan COMMAND TOOL BASE ${OPTS})
== list
set(OPTS --verbose)
list(APPEND OPTS OPTION)
add_custom_target(plan COMMAND TOOL BASE ${OPTS})
== program
find_program(TRTEXEC_BIN TOOL)
add_custom_target(plan COMMAND ${TRTEXEC_BIN} BASE OPTION)
== program in a variable
set(EXEC ${TRT_ROOT}/bin/TOOL)
add_custom_target(plan COMMAND ${EXEC} BASE OPTION)
== test
add_test(NAME build COMMAND TOOL BASE OPTION)
"""),
    "build.ps1": _forms("""
== plain
& "C:\\TensorRT\\bin\\TOOL.exe" BASE OPTION
== variable
$opts = "OPTION"
TOOL.exe BASE $opts
== list
$cmdArgs = @("BASE", "OPTION")
& TOOL @cmdArgs
== start
Start-Process -FilePath "TOOL.exe" -ArgumentList "BASE OPTION" -Wait
== start with a list
Start-Process TOOL.exe -ArgumentList "BASE", "OPTION"
== grown
$cmdArgs = @("BASE")
$cmdArgs += "OPTION"
& TOOL $cmdArgs
"""),
    "build.bat": _forms("""
== plain
TOOL.exe BASE OPTION
== continued
TOOL.exe BASE ^
  OPTION
== variable
set OPTS=OPTION
TOOL BASE %OPTS%
== quoted variable
set "OPTS=OPTION"
TOOL BASE %OPTS%
== program
set TRT=C:\\TensorRT\\bin\\TOOL.exe
%TRT% BASE OPTION
== call
call TOOL.exe BASE OPTION
== loop
for %%f in (*.onnx) do TOOL.exe BASE OPTION
"""),
    "README.md": _forms("""
== block
```bash
TOOL BASE OPTION
```
== prompt
```console
$ TOOL BASE OPTION
```
== docker
```
docker run image TOOL BASE OPTION
```
== variable
```sh
OPTS="OPTION"
TOOL BASE $OPTS
```
"""),
    "build.py": _forms("""
== list
import subprocess
subprocess.run(["TOOL", "BASE", "OPTION"])
== list in a variable
import subprocess
cmd = ["TOOL", "BASE", "OPTION"]
subprocess.run(cmd)
== text
import os
os.system("TOOL BASE OPTION")
== text in a variable
import os
cmd = "TOOL BASE OPTION"
os.system(cmd)
== formatted
import os
os.system(f"TOOL BASE OPTION --saveEngine={out}")
== sum of texts
import os
os.system("TOOL BASE --saveEngine=" + out + " OPTION")
== formatted by percent
import os
os.system("TOOL BASE --saveEngine=%s OPTION" % out)
== formatted by format
import os
os.system("TOOL BASE --saveEngine={} OPTION".format(out))
== several texts
import os
os.system("TOOL BASE "
          f"--saveEngine={out} "
          "OPTION")
== several lines
import os
os.system(f'''TOOL BASE \\\\
  --saveEngine={out} \\\\
  OPTION''')
== split
import shlex, subprocess
subprocess.run(shlex.split("TOOL BASE OPTION"))
== split by blanks
import subprocess
subprocess.run("TOOL BASE OPTION".split())
== joined
import os
os.system(" ".join(["TOOL", "BASE", "OPTION"]))
== appended
cmd = ["TOOL", "BASE"]
if low:
    cmd.append("OPTION")
run(cmd)
== extended
cmd = ["TOOL", "BASE"]
cmd.extend(["--verbose", "OPTION"])
run(cmd)
== inserted
cmd = ["TOOL", "BASE"]
cmd.insert(1, "OPTION")
run(cmd)
== added
cmd = ["TOOL", "BASE"]
cmd += ["OPTION"]
run(cmd)
== sum of lists
run(["TOOL", "BASE"] + ["OPTION"])
== sum of variables
LOW = ["OPTION"]
run(["TOOL", "BASE"] + LOW)
== starred
LOW = ["OPTION"]
run(["TOOL", "BASE", *LOW])
== starred choice
run(["TOOL", "BASE", *(["OPTION"] if low else [])])
== choice
run(["TOOL", "BASE", "OPTION" if low else "--verbose"])
== option in a variable
OPT = "OPTION"
run(["TOOL", "BASE", OPT])
== option in a formatted text
opt = "OPTION" if low else ""
os.system(f"TOOL BASE {opt}")
== option in a dictionary
OPTS = {"low": "OPTION", "high": ""}
run(["TOOL", "BASE", OPTS[kind]])
== option in a dictionary of lists
OPTS = {"low": ["OPTION"], "high": []}
run(["TOOL", "BASE", *OPTS[kind]])
== program in a variable
BIN = "/usr/src/tensorrt/bin/TOOL"
run([BIN, "BASE", "OPTION"])
== program in a formatted text
BIN = "/usr/src/tensorrt/bin/TOOL"
os.system(f"{BIN} BASE OPTION")
== program in a path
from pathlib import Path
BIN = Path("/usr/src/tensorrt/bin") / "TOOL"
run([str(BIN), "BASE", "OPTION"])
== program by which
import shutil
exe = shutil.which("TOOL")
run([exe, "BASE", "OPTION"])
== program by default
def build(exe="TOOL"):
    run([exe, "BASE", "OPTION"])
== program in a field
class Builder:
    exe = "TOOL"
    def run(self):
        run([self.exe, "BASE", "OPTION"])
== program from the environment
import os
exe = os.environ.get("EXE", "/usr/src/tensorrt/bin/TOOL")
run([exe, "BASE", "OPTION"])
== text that grows
cmd = "TOOL BASE"
if low:
    cmd += " OPTION"
os.system(cmd)
== text that grows by itself
cmd = "TOOL BASE"
cmd = cmd + " OPTION"
os.system(cmd)
== text that grows by format
cmd = "TOOL BASE"
cmd = f"{cmd} OPTION"
os.system(cmd)
== returned options
def options(low):
    return ["--verbose", "OPTION"] if low else []
run(["TOOL", "BASE", *options(True)])
== returned option
def option(low):
    if low:
        return "OPTION"
    return ""
run(f"TOOL BASE {option(True)}")
== wrapper
def tool(*args):
    subprocess.run(["TOOL", *args])
tool("BASE", "OPTION")
== wrapper with a list
def tool(args):
    subprocess.run(["TOOL"] + args)
tool(["BASE", "OPTION"])
== tuple
CMD = ("TOOL", "BASE", "OPTION")
== docker
run(["docker", "run", "--rm", "image", "TOOL", "BASE", "OPTION"])
== bash
run(["bash", "-c", "TOOL BASE OPTION"])
== keyword
subprocess.Popen(args=["TOOL", "BASE", "OPTION"])
== default of an argument
def build(extra="OPTION"):
    os.system(f"TOOL BASE {extra}")
== field of a data class
from dataclasses import dataclass
@dataclass
class Config:
    extra: str = "OPTION"
def build(config):
    os.system(f"TOOL BASE {config.extra}")
== list by a comprehension
names = ["OPTION"]
run(["TOOL", "BASE"] + [f"{one}" for one in names])
== async
async def go():
    await asyncio.create_subprocess_exec("TOOL", "BASE", "OPTION")
== several arguments
sh.call("TOOL", "BASE", "OPTION")
== printed script
script = '''#!/bin/sh
TOOL BASE OPTION
'''
== join of a variable
parts = ["TOOL", "BASE"]
parts.append("OPTION")
os.system(" ".join(parts))
"""),
    "build.cpp": _forms("""
== system
void f() { system("TOOL BASE OPTION"); }
== sum
void f(std::string out) { std::string cmd = "TOOL BASE --saveEngine=" + out + " OPTION"; system(cmd.c_str()); }
== grown
void f(bool low) { std::string cmd = "TOOL BASE"; if (low) cmd += " OPTION"; system(cmd.c_str()); }
== stream
void f() { std::ostringstream s; s << "TOOL BASE --saveEngine=" << out << " OPTION"; system(s.str().c_str()); }
== list
void f() { std::vector<std::string> a = {"TOOL", "BASE", "OPTION"}; run(a); }
== array
void f() { const char* argv[] = {"TOOL", "BASE", "OPTION", nullptr}; execvp(argv[0], argv); }
== exec
void f() { execlp("TOOL", "TOOL", "BASE", "OPTION", nullptr); }
== format
void f() { snprintf(b, 99, "TOOL BASE --saveEngine=%s OPTION", out); system(b); }
== literals
void f() { system("TOOL BASE "
                  "OPTION"); }
"""),
    "demo.ipynb": _forms("""
== magic
!TOOL BASE OPTION
== magic over lines
!TOOL BASE \\
  OPTION
== cell
%%bash
TOOL BASE OPTION
== cell over lines
%%bash
cd models
TOOL BASE \\
  OPTION
== cell of another shell
%%sh
TOOL BASE OPTION
== variable of Python
opts = "OPTION"
!TOOL BASE {opts}
== variable of the shell
opts = "OPTION"
!TOOL BASE $opts
== captured
log = !TOOL BASE OPTION
== system
get_ipython().system("TOOL BASE OPTION")
== after a folder
!cd models && TOOL BASE OPTION
== script
%%script bash
TOOL BASE OPTION
== written
%%writefile build.sh
TOOL BASE OPTION
== list
import subprocess
subprocess.run(["TOOL", "BASE", "OPTION"])
"""),
}
"""Command lines, by the kind of file; TOOL with BASE and OPTION."""

MAKERS = {
    "IBuilderConfig": "create_builder_config()", "INetworkDefinition": "create_network()", "ILayer": "get_layer(0)",
    "ITensor": "get_input(0)", "ICudaEngine": "deserialize_cuda_engine(b)", "IExecutionContext": "create_execution_context()",
    "INormalizationLayer": "add_normalization(a, b, c, 1)", "IPluginRegistry": "get_plugin_registry()",
    "IConvolutionLayer": "add_convolution_nd(a, 1, k)", "IDeconvolutionLayer": "add_deconvolution_nd(a, 1, k)",
    "IPoolingLayer": "add_pooling_nd(a, t, k)", "IPaddingLayer": "add_padding_nd(a, b, c)",
}  # fmt: skip
_CONSTRUCTED = {"Builder": "trt.Builder(log)", "OnnxParser": "trt.OnnxParser(net, log)", "Refitter": "trt.Refitter(e, log)"}
_VALUES = {"--workspace": "=64", "--calib": "=c.bin", "--precisionConstraints": "=obey", "--layerPrecisions": "=*:fp16"}


def rewrites(rules: RuleSet) -> Iterator[Rewrite]:
    """Every construct of every rule in every form that applies to it."""
    for name, rule in rules.python.items():
        owner, _, member = name.partition(".")
        enum = bool(member) and (member.isupper() or not member[:1].islower())
        forms = PYTHON_CLASSES if not member else PYTHON_NAMES if enum else PYTHON_MEMBERS
        make = MAKERS.get(owner)
        for form, text in forms.items():
            if make is None and "MAKE" in text and owner not in _CONSTRUCTED:
                continue
            thing = "network" if owner in ("ILayer", "ITensor") else "thing"
            whole = text.replace("thing.MAKE", _CONSTRUCTED.get(owner, f"{thing}.{make}")).replace("thing", thing)
            yield Rewrite(rule.id, name, form, "tool.py", whole.replace("OWNER", owner).replace("MEMBER", member))
    for name, rule in rules.cpp.items():
        owner, _, member = name.partition("::")
        enum = bool(member) and (member.startswith("k"))
        if not member and owner[:1].islower():
            continue  # a function
        forms = CPP_CLASSES if not member else CPP_NAMES if enum else CPP_MEMBERS
        if owner.startswith(("IPluginV2", "IPlugin")) and member and owner != "IPluginRegistry":
            continue  # overrides
        space = "nvonnxparser" if owner == "IParser" else "nvinfer1"
        for form, text in forms.items():
            if member == "destroy" and ("qq.MEMBER" in text or "(*qq)" in text):
                continue
            whole = text.replace("OWNER", owner).replace("MEMBER", member).replace("ARGS", "0").replace("nvinfer1", space)
            yield Rewrite(rule.id, name, form, "tool.cpp", _CPP_HEAD + whole)
    for tool in ("trtexec", "polygraphy"):
        base = "--onnx=m.onnx" if tool == "trtexec" else "convert m.onnx"
        for option, rule in getattr(rules, tool).items():
            for file, forms in SHELL.items():
                for form, text in forms.items():
                    shown = option + _VALUES.get(option, "")
                    listed = base if '"BASE"' not in text else base.replace(" ", '", "')
                    whole = text.replace("BASE", listed).replace("OPTION", shown).replace("TOOL", tool)
                    head = "#!/bin/sh\n" if file.endswith(".sh") else _CPP_HEAD if file.endswith(".cpp") else ""
                    if file.endswith(".ipynb"):
                        import json

                        cell = {"cell_type": "code", "source": whole.rstrip("\n"), "metadata": {}, "outputs": []}
                        whole = json.dumps({"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}, indent=1)
                    yield Rewrite(rule.id, option, form, file, head + whole)


def finds(case: Rewrite, rules: RuleSet) -> bool:
    """Whether the rule has a finding in the file."""
    path = PurePath(case.file)
    kind: Kind | None = file_kind(path)  # type: ignore[arg-type]
    assert kind is not None
    try:
        return any(hit.rule.id == case.rule for hit in scan_source(Source(path, case.text), kind, rules))
    except SyntaxError as error:
        raise AssertionError(f"{case.form}: {error}\n{case.text}") from error


def sample(cases: list[Rewrite], count: int, seed: int) -> list[Rewrite]:
    """Some of the cases: of each form at least one."""
    chosen = random.Random(seed)
    chosen.shuffle(cases)
    first = {(case.file, case.form): case for case in cases}
    return [*first.values(), *cases[: max(0, count - len(first))]]
