"""Several kernels with one template as one C++ function, which calls the template's function for each of them.

static void part(float* out0, const float* in0, int64_t n, int64_t threads) { ... }
extern "C" void step_1f0c(void* t0, void* t1, void* t2, void* t3, int64_t threads) {
  part((float*)t1, (const float*)t0, 4096, threads);
  part((float*)t3, (const float*)t2, 100, 1);
}
"""

from __future__ import annotations

from collections.abc import Sequence

from overlapc.codegen.cpp.function import Function
from overlapc.codegen.cpp.loop_plan import PARALLEL_WORK, plan
from overlapc.codegen.cpp.reduce import ReductionFunction
from overlapc.ir.body import Body
from overlapc.ir.template import SIZE, template_of


def combo_text(bodies: Sequence[Body], arguments: dict[str, str]) -> tuple[str, tuple[str, ...]]:
    """Return the text, in which the function is called KERNEL_NAME, and the buffers that the function takes.

    bodies: loop bodies that all have the same template.
    arguments: parameter names of the template's buffers, in order.
    """
    templates = [template_of(body) for body in bodies]
    kind = templates[0]
    buffers = list(dict.fromkeys(buffer for template in templates for buffer in template.buffers))
    number = {buffer: at for at, buffer in enumerate(buffers)}
    sizes = () if kind.size is None else (SIZE,)
    hints = {str(SIZE): max(template.size or 1 for template in templates)}
    planned = plan(kind.body, hints)
    function = (ReductionFunction if kind.body.reduction else Function)(kind.body, planned, arguments, sizes)
    # If it were inlined, GCC 12 would not vectorize its `omp simd` loops.
    lines = [*function.text("__attribute__((noinline)) static", "part").splitlines(), ""]
    alone, together, together_work = [], [], 0
    for body, template in zip(bodies, templates, strict=True):
        of = dict(zip((f"b{at}" for at in range(len(template.buffers))), template.buffers, strict=True))
        given = [f"({function.parameter_type(buffer)})t{number[of[buffer]]}" for buffer in arguments]
        given += [] if template.size is None else [str(template.size)]
        work = int(body.numel() * body.reduction_numel()) * planned.work_per_iteration
        if work >= PARALLEL_WORK:
            alone.append(f"part({', '.join(given)}, threads);")
        else:
            together.append(f"part({', '.join(given)}, 1);")
            together_work += work
    parameters = [*(f"void* t{at}" for at in range(len(buffers))), "int64_t threads"]
    lines.append(f'extern "C" void KERNEL_NAME({", ".join(parameters)}) {{')
    if together_work >= PARALLEL_WORK:  # each kernel is too small for several threads
        lines.append("  #pragma omp parallel for num_threads(threads) schedule(dynamic)")
        lines.append(f"  for (int64_t at = 0; at < {len(together)}; ++at) switch (at) {{")
        lines += [f"    case {at}: {call} break;" for at, call in enumerate(together)]
        lines.append("  }")
    else:
        lines += [f"  {call}" for call in together]
    lines += [*(f"  {call}" for call in alone), "}", ""]
    return "\n".join(lines), tuple(buffers)
