/* Enqueues the commands of a collective by copies (commands.py) on a GPU with one call from Python.

   A `CopyStream` runs commands in order on one stream, and copies within the GPU's own memory on a second one. The GPU's
   front end waits for flags and sets them (stream memory operations); copy engines move the data.

   Only Python's C API is used, and the driver's library is opened at run time, so this compiles in a second and does
   not depend on torch's version. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <stdint.h>

/* One command as `packed` in command_queues.py writes it. */
enum { COPY, OWN_COPY, POST, UNTIL };
typedef struct {
  int64_t kind;
  uint64_t target; /* of a copy; the flag's address otherwise */
  uint64_t source;
  int64_t bytes;   /* of a copy; the flag's value otherwise, counted from the number that `base` selects */
  int64_t base;    /* of a flag's value: 0 the run's first collective, 1 its first release */
} Command;

/* CUstreamBatchMemOpParams, with the fields of its 32-bit waits and writes. */
typedef struct {
  uint32_t operation;
  uint64_t address, value;
  uint32_t flags;
  uint64_t alias, padding;
} MemoryOperation;
enum { WAIT_VALUE = 1, WRITE_VALUE = 2, AT_LEAST = 0, FENCED = 0, MOST_OPERATIONS = 256, NO_TIMING = 2, NOT_READY = 600 };

typedef void *Event, *Stream, *Context;

static struct {
  int (*copy)(uint64_t target, uint64_t source, size_t bytes, Stream stream);
  int (*operate)(Stream stream, unsigned count, MemoryOperation *operations, unsigned flags);
  int (*wait_event)(Stream stream, Event event, unsigned flags);
  int (*create_event)(Event *event, unsigned flags);
  int (*record_event)(Event event, Stream stream);
  int (*query_event)(Event event);
  int (*destroy_event)(Event event);
  int (*context)(Context *context);
  int (*enter)(Context context);
  int (*leave)(Context *context);
  int (*context_of)(Stream stream, Context *context);
} driver;

static PyObject *open_driver(PyObject *module, PyObject *path) {
  static const char *const names[] = {"cuMemcpyAsync", "cuStreamBatchMemOp_v2", "cuStreamWaitEvent", "cuEventCreate",
                                      "cuEventRecord", "cuEventQuery", "cuEventDestroy_v2", "cuCtxGetCurrent",
                                      "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuStreamGetCtx"};
  const char *name = PyUnicode_AsUTF8(path);
  if (!name) return NULL;
  void *library = dlopen(name, RTLD_LAZY);
  if (!library) return PyErr_Format(PyExc_OSError, "%s", dlerror());
  void *found[sizeof names / sizeof *names];
  _Static_assert(sizeof found == sizeof driver, "a name for each function");
  for (size_t at = 0; at < sizeof names / sizeof *names; ++at)
    if (!(found[at] = dlsym(library, names[at]))) return PyErr_Format(PyExc_OSError, "%s has no %s", name, names[at]);
  memcpy(&driver, found, sizeof driver);
  Py_RETURN_NONE;
}

typedef struct {
  const char *call; /* that failed */
  int error;
} Failure;

#define CHECK(call, name)                                              \
  do {                                                                 \
    int code = (call);                                                 \
    if (code) return (Failure){name, code};                            \
  } while (0)

#define STEP(call)                      \
  do {                                  \
    Failure failure = (call);           \
    if (failure.error) return failure;  \
  } while (0)

static PyObject *refused(Failure failure) {
  return PyErr_Format(PyExc_RuntimeError, "%s failed with CUDA driver error %d", failure.call, failure.error);
}

/* Makes a context current if it is not: a thread may have another device's, and a thread that has not used a GPU yet has
   none. `*entered` says whether the caller has to call `driver.leave`. */
static Failure enter(Context context, int *entered) {
  Context current = NULL;
  CHECK(driver.context(&current), "cuCtxGetCurrent");
  if (current == context) return (Failure){0};
  CHECK(driver.enter(context), "cuCtxPushCurrent");
  *entered = 1;
  return (Failure){0};
}

static void leave(int entered) {
  Context left;
  if (entered) driver.leave(&left);
}

/* --- the end of a collective */

typedef struct {
  PyObject_HEAD
  Event event;
  Context context;
} Done;

static PyObject *done_query(Done *self, PyObject *unused) {
  int error = driver.query_event(self->event);
  if (error && error != NOT_READY) return refused((Failure){"cuEventQuery", error});
  return PyBool_FromLong(!error);
}

static Failure wait_in_context(Done *self, Stream stream, int *entered) {
  STEP(enter(self->context, entered));
  CHECK(driver.wait_event(stream, self->event, 0), "cuStreamWaitEvent");
  return (Failure){0};
}

static PyObject *done_wait(Done *self, PyObject *stream) {
  uint64_t number = PyLong_AsUnsignedLongLong(stream);
  if (number == (uint64_t)-1 && PyErr_Occurred()) return NULL;
  int entered = 0;
  Failure failure = wait_in_context(self, (Stream)(uintptr_t)number, &entered);
  leave(entered);
  if (failure.error) return refused(failure);
  Py_RETURN_NONE;
}

static void done_free(PyObject *object) {
  if (((Done *)object)->event) driver.destroy_event(((Done *)object)->event); /* the driver keeps it while in use */
  Py_TYPE(object)->tp_free(object);
}

static PyMethodDef done_methods[] = {
    {"query", (PyCFunction)done_query, METH_NOARGS, "query() -> whether the commands are done"},
    {"wait", (PyCFunction)done_wait, METH_O, "wait(stream): let nothing enqueued later begin before they are done"},
    {NULL},
};

static PyTypeObject DoneType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "overlapc_copies.Done",
    .tp_doc = "when the commands of one `CopyStream.run` are done",
    .tp_basicsize = sizeof(Done),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = done_free,
    .tp_methods = done_methods,
};

/* --- the streams */

typedef struct {
  PyObject_HEAD
  Stream main, own;
  Event joint; /* orders one stream after another; free again at once, because a wait is for the last record before it */
  Context context;
} CopyStream;

static Failure after(CopyStream *self, Stream later, Stream earlier) {
  CHECK(driver.record_event(self->joint, earlier), "cuEventRecord");
  CHECK(driver.wait_event(later, self->joint, 0), "cuStreamWaitEvent");
  return (Failure){0};
}

static Failure flush(CopyStream *self, MemoryOperation *operations, unsigned *count) {
  unsigned enqueued = *count;
  *count = 0;
  if (enqueued) CHECK(driver.operate(self->main, enqueued, operations, 0), "cuStreamBatchMemOp");
  return (Failure){0};
}

static Failure enqueue(CopyStream *self, Stream current, const Command *commands, Py_ssize_t count, const int64_t *base,
                       Event done) {
  MemoryOperation operations[MOST_OPERATIONS];
  unsigned flags = 0;
  int forked = 0;
  STEP(after(self, self->main, current));
  for (const Command *command = commands; command < commands + count; ++command) {
    if (command->kind == POST || command->kind == UNTIL) {
      if (flags == MOST_OPERATIONS) STEP(flush(self, operations, &flags));
      uint32_t value = (uint32_t)(command->bytes + base[command->base]); /* flags wrap around */
      /* By default a write is fenced: peers see all writes before it. */
      operations[flags++] = command->kind == UNTIL ? (MemoryOperation){WAIT_VALUE, command->target, value, AT_LEAST}
                                                   : (MemoryOperation){WRITE_VALUE, command->target, value, FENCED};
      continue;
    }
    STEP(flush(self, operations, &flags));
    if (command->kind == OWN_COPY && !forked++) STEP(after(self, self->own, self->main));
    CHECK(driver.copy(command->target, command->source, command->bytes,
                      command->kind == OWN_COPY ? self->own : self->main),
          "cuMemcpyAsync");
  }
  STEP(flush(self, operations, &flags));
  if (forked) STEP(after(self, self->main, self->own));
  CHECK(driver.record_event(done, self->main), "cuEventRecord");
  return (Failure){0};
}

static Failure enqueue_in_context(CopyStream *self, Stream current, const Command *commands, Py_ssize_t count,
                                  const int64_t *base, Done *done, int *entered) {
  STEP(enter(self->context, entered));
  CHECK(driver.create_event(&done->event, NO_TIMING), "cuEventCreate");
  return enqueue(self, current, commands, count, base, done->event);
}

static PyObject *copy_stream_run(CopyStream *self, PyObject *const *args, Py_ssize_t given) {
  if (given != 4) return PyErr_Format(PyExc_TypeError, "run takes 4 arguments, not %zd", given);
  uint64_t current = PyLong_AsUnsignedLongLong(args[0]);
  if (current == (uint64_t)-1 && PyErr_Occurred()) return NULL;
  char *commands;
  Py_ssize_t bytes;
  if (PyBytes_AsStringAndSize(args[1], &commands, &bytes)) return NULL;
  int64_t base[] = {PyLong_AsLongLong(args[2]), PyLong_AsLongLong(args[3])};
  if (PyErr_Occurred()) return NULL;
  Done *done = PyObject_New(Done, &DoneType);
  if (!done) return NULL;
  done->event = NULL;
  done->context = self->context;
  int entered = 0;
  Py_ssize_t count = bytes / sizeof(Command);
  Failure failure;
  Py_BEGIN_ALLOW_THREADS /* a call waits while the driver's queue is full */
  failure = enqueue_in_context(self, (Stream)(uintptr_t)current, (Command *)commands, count, base, done, &entered);
  leave(entered);
  Py_END_ALLOW_THREADS
  if (!failure.error) return (PyObject *)done;
  Py_DECREF(done);
  return refused(failure);
}

static Failure create_joint(CopyStream *self, int *entered) {
  CHECK(driver.context_of(self->main, &self->context), "cuStreamGetCtx");
  STEP(enter(self->context, entered));
  CHECK(driver.create_event(&self->joint, NO_TIMING), "cuEventCreate");
  return (Failure){0};
}

static PyObject *copy_stream_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"stream", "own_stream", NULL};
  unsigned long long stream, own;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "KK", names, &stream, &own)) return NULL;
  CopyStream *self = (CopyStream *)type->tp_alloc(type, 0);
  if (!self) return NULL;
  self->main = (Stream)(uintptr_t)stream;
  self->own = (Stream)(uintptr_t)own;
  int entered = 0;
  Failure failure = create_joint(self, &entered);
  leave(entered);
  if (!failure.error) return (PyObject *)self;
  Py_DECREF(self);
  return refused(failure);
}

static void copy_stream_free(PyObject *object) {
  if (((CopyStream *)object)->joint) driver.destroy_event(((CopyStream *)object)->joint);
  Py_TYPE(object)->tp_free(object);
}

static PyMethodDef copy_stream_methods[] = {
    {"run", (PyCFunction)(void (*)(void))copy_stream_run, METH_FASTCALL,
     "run(current_stream, commands, collective, release) -> Done: enqueue packed commands after the work of a stream"},
    {NULL},
};

static PyTypeObject CopyStreamType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "overlapc_copies.CopyStream",
    .tp_doc = "CopyStream(stream, own_stream): both of one device",
    .tp_basicsize = sizeof(CopyStream),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_new = copy_stream_new,
    .tp_dealloc = copy_stream_free,
    .tp_methods = copy_stream_methods,
};

static PyMethodDef functions[] = {
    {"open_driver", open_driver, METH_O, "open_driver(path): use this CUDA driver; OSError if it lacks a function"},
    {NULL},
};

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "overlapc_copies", .m_size = -1,
                                 .m_methods = functions};

PyMODINIT_FUNC PyInit_overlapc_copies(void) {
  PyObject *module = PyModule_Create(&definition);
  if (module && (PyModule_AddType(module, &DoneType) || PyModule_AddType(module, &CopyStreamType))) Py_CLEAR(module);
  return module;
}
