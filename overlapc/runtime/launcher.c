/* Launches one compiled kernel with one call from Python.

   A `Launcher` holds everything about a GPU kernel that does not change between calls: its functions in the driver,
   their grids, blocks and shared memory, and the scratch memory between stages. A call takes only the tensors. In cases
   that it does not support (a pointer that is not aligned, another device) it calls a Python function with the same
   arguments. A `HostLauncher` calls a C function on the calling thread.

   Only Python's C API is used, and the driver's library is opened at run time, so this compiles in a second and does
   not depend on torch's version. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <structmember.h>

#define ALIGNMENT 16 /* bytes; what the kernels were compiled for */

/* The address of a tensor's first element; (uint64_t)-1 with an exception set. */
static uint64_t address_of(PyObject *data_ptr, PyObject *const *tensor) {
  PyObject *number = PyObject_Vectorcall(data_ptr, tensor, 1, NULL);
  if (!number) return (uint64_t)-1;
  uint64_t address = PyLong_AsUnsignedLongLong(number);
  Py_DECREF(number);
  return address;
}

static int failed(uint64_t value) { return value == (uint64_t)-1 && PyErr_Occurred(); }

/* --- kernels on a GPU */

typedef int (*LaunchKernel)(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                            unsigned block_y, unsigned block_z, unsigned shared, void *stream, void **parameters,
                            void **extra);
typedef int (*CurrentContext)(void **context);
typedef int (*ErrorString)(int error, const char **text);

/* The functions used from the driver's library, which stays open. */
typedef struct {
  LaunchKernel launch;
  CurrentContext context;
  ErrorString text;
} Driver;

#define DRIVER "overlapc.driver"

static void driver_free(PyObject *capsule) { PyMem_Free(PyCapsule_GetPointer(capsule, DRIVER)); }

static PyObject *open_driver(PyObject *module, PyObject *path) {
  const char *name = PyUnicode_AsUTF8(path);
  if (!name) return NULL;
  void *library = dlopen(name, RTLD_LAZY);
  if (!library) return PyErr_Format(PyExc_OSError, "%s", dlerror());
  Driver found = {(LaunchKernel)dlsym(library, "cuLaunchKernel"), (CurrentContext)dlsym(library, "cuCtxGetCurrent"),
                  (ErrorString)dlsym(library, "cuGetErrorString")};
  if (!found.launch || !found.context || !found.text)
    return PyErr_Format(PyExc_OSError, "%s is not a CUDA driver", name);
  Driver *driver = PyMem_Malloc(sizeof *driver);
  if (!driver) return PyErr_NoMemory();
  *driver = found;
  return PyCapsule_New(driver, DRIVER, driver_free);
}

typedef struct {
  void *function;
  unsigned programs, threads, shared;
} Stage;

typedef struct {
  PyObject_HEAD
  vectorcallfunc call;
  Py_ssize_t pointers, scratches, stages;
  Stage *stage;
  Driver driver;
  void *context;       /* the context that the functions were loaded into */
  PyObject *name;      /* for errors */
  PyObject *scratch;   /* tuple of (size, stride, dtype), the arguments of `empty` */
  PyObject *empty;     /* allocates a tensor */
  PyObject *data_ptr;  /* returns a tensor's address */
  PyObject *stream_of; /* returns the current stream of a device */
  PyObject *device;
  PyObject *otherwise; /* called where this launcher cannot run */
} Launcher;

/* Stores new scratch tensors in `held` and their addresses in `values`; returns -1 with an exception set on failure. */
static int allocate(Launcher *self, PyObject **held, uint64_t *values) {
  for (Py_ssize_t at = 0; at < self->scratches; ++at) {
    PyObject *form = PyTuple_GET_ITEM(self->scratch, at);
    PyObject *arguments[] = {PyTuple_GET_ITEM(form, 0), PyTuple_GET_ITEM(form, 1), PyTuple_GET_ITEM(form, 2)};
    held[at] = PyObject_Vectorcall(self->empty, arguments, 3, NULL);
    if (!held[at]) return -1;
    values[at] = address_of(self->data_ptr, &held[at]);
    if (failed(values[at])) return -1;
  }
  return 0;
}

/* Launches all stages; returns -1 with an exception set on failure. */
static int enqueue(Launcher *self, void *stream, uint64_t *values) {
  /* Kernels of Triton 3.6 take two more pointers, to scratch memory that ours do not use. */
  Py_ssize_t count = self->pointers + self->scratches;
  void *parameters[count + 2];
  values[count] = values[count + 1] = 0;
  for (Py_ssize_t at = 0; at < count + 2; ++at) parameters[at] = &values[at];
  int error = 0;
  Py_BEGIN_ALLOW_THREADS /* a launch waits while the driver's queue is full */
  for (Py_ssize_t at = 0; at < self->stages && !error; ++at) {
    Stage *stage = &self->stage[at];
    if (stage->programs)
      error = self->driver.launch(stage->function, stage->programs, 1, 1, stage->threads, 1, 1, stage->shared, stream,
                                  parameters, NULL);
  }
  Py_END_ALLOW_THREADS
  if (!error) return 0;
  const char *text = NULL;
  self->driver.text(error, &text);
  PyErr_Format(PyExc_RuntimeError, "launch of %U: CUDA error %d: %s", self->name, error, text ? text : "unknown");
  return -1;
}

static PyObject *launcher_call(PyObject *object, PyObject *const *tensors, size_t flags, PyObject *keywords) {
  Launcher *self = (Launcher *)object;
  Py_ssize_t given = PyVectorcall_NARGS(flags);
  if ((keywords && PyTuple_GET_SIZE(keywords)) || given != self->pointers)
    return PyErr_Format(PyExc_TypeError, "%U takes %zd tensors, not %zd", self->name, self->pointers, given);
  void *context = NULL;
  uint64_t values[self->pointers + self->scratches + 2], together = 0;
  for (Py_ssize_t at = 0; at < given; ++at) {
    values[at] = address_of(self->data_ptr, &tensors[at]);
    if (failed(values[at])) return NULL;
    together |= values[at];
  }
  if (together % ALIGNMENT || self->driver.context(&context) || context != self->context)
    return PyObject_Vectorcall(self->otherwise, tensors, given, NULL);
  PyObject *stream = PyObject_Vectorcall(self->stream_of, &self->device, 1, NULL);
  if (!stream) return NULL;
  uint64_t number = PyLong_AsUnsignedLongLong(stream);
  Py_DECREF(stream);
  if (failed(number)) return NULL;
  PyObject *held[self->scratches + 1];
  memset(held, 0, sizeof held);
  int error = allocate(self, held, values + given) || enqueue(self, (void *)(uintptr_t)number, values);
  /* May be freed now: the allocator reuses scratch memory only for later work on the same stream. */
  for (Py_ssize_t at = 0; at < self->scratches; ++at) Py_XDECREF(held[at]);
  if (error) return NULL;
  Py_RETURN_NONE;
}

static int launcher_traverse(PyObject *object, visitproc visit, void *arg) {
  Launcher *self = (Launcher *)object;
  Py_VISIT(self->scratch);
  Py_VISIT(self->empty);
  Py_VISIT(self->data_ptr);
  Py_VISIT(self->stream_of);
  Py_VISIT(self->device);
  Py_VISIT(self->otherwise);
  return 0;
}

static int launcher_clear(PyObject *object) {
  Launcher *self = (Launcher *)object;
  Py_CLEAR(self->name);
  Py_CLEAR(self->scratch);
  Py_CLEAR(self->empty);
  Py_CLEAR(self->data_ptr);
  Py_CLEAR(self->stream_of);
  Py_CLEAR(self->device);
  Py_CLEAR(self->otherwise);
  return 0;
}

static void launcher_free(PyObject *object) {
  PyObject_GC_UnTrack(object);
  launcher_clear(object);
  PyMem_Free(((Launcher *)object)->stage);
  Py_TYPE(object)->tp_free(object);
}

static PyObject *launcher_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"driver",   "name",      "stages", "pointers",  "scratch", "empty",
                          "data_ptr", "stream_of", "device", "otherwise", NULL};
  PyObject *capsule, *name, *stages, *scratch, *empty, *data_ptr, *stream_of, *device, *otherwise;
  Py_ssize_t pointers;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OUO!nO!OOOOO", names, &capsule, &name, &PyTuple_Type, &stages,
                                   &pointers, &PyTuple_Type, &scratch, &empty, &data_ptr, &stream_of, &device,
                                   &otherwise))
    return NULL;
  Driver *driver = PyCapsule_GetPointer(capsule, DRIVER);
  if (!driver) return NULL;
  Launcher *self = (Launcher *)type->tp_alloc(type, 0);
  if (!self) return NULL;
  self->call = launcher_call;
  self->driver = *driver;
  self->pointers = pointers;
  self->scratches = PyTuple_GET_SIZE(scratch);
  self->stages = PyTuple_GET_SIZE(stages);
  self->name = Py_NewRef(name);
  self->scratch = Py_NewRef(scratch);
  self->empty = Py_NewRef(empty);
  self->data_ptr = Py_NewRef(data_ptr);
  self->stream_of = Py_NewRef(stream_of);
  self->device = Py_NewRef(device);
  self->otherwise = Py_NewRef(otherwise);
  self->stage = PyMem_Calloc(self->stages + 1, sizeof(Stage));
  if (!self->stage) PyErr_NoMemory();
  for (Py_ssize_t at = 0; at < self->stages && !PyErr_Occurred(); ++at) {
    Stage *stage = &self->stage[at];
    PyObject *form = PyTuple_GET_ITEM(stages, at);
    unsigned long long function;
    if (!PyTuple_Check(form))
      PyErr_SetString(PyExc_TypeError, "a stage is (function, programs, threads, shared)");
    else if (PyArg_ParseTuple(form, "KIII", &function, &stage->programs, &stage->threads, &stage->shared))
      stage->function = (void *)(uintptr_t)function;
  }
  for (Py_ssize_t at = 0; at < self->scratches && !PyErr_Occurred(); ++at) {
    PyObject *form = PyTuple_GET_ITEM(scratch, at);
    if (!PyTuple_Check(form) || PyTuple_GET_SIZE(form) != 3)
      PyErr_SetString(PyExc_TypeError, "scratch is (size, stride, dtype)");
  }
  int error = PyErr_Occurred() ? 0 : driver->context(&self->context);
  if (error) PyErr_Format(PyExc_RuntimeError, "no CUDA context: error %d", error);
  if (!PyErr_Occurred()) return (PyObject *)self;
  Py_DECREF(self);
  return NULL;
}

static PyMemberDef launcher_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Launcher, call), READONLY, NULL},
    {"otherwise", T_OBJECT_EX, offsetof(Launcher, otherwise), READONLY, "called where this launcher cannot run"},
    {NULL},
};

static PyTypeObject LauncherType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "overlapc_launcher.Launcher",
    .tp_doc = "launcher(*tensors) -> None",
    .tp_basicsize = sizeof(Launcher),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Launcher, call),
    .tp_call = PyVectorcall_Call,
    .tp_new = launcher_new,
    .tp_dealloc = launcher_free,
    .tp_traverse = launcher_traverse,
    .tp_clear = launcher_clear,
    .tp_members = launcher_members,
};

/* --- kernels on the host */

typedef struct {
  PyObject_HEAD
  vectorcallfunc call;
  Py_ssize_t pointers, sizes;
  int (*function)(const uint64_t *words); /* words: the addresses, the sizes and the number of threads */
  PyObject *name;                         /* for errors */
  PyObject *data_ptr;                     /* returns a tensor's address */
  PyObject *threads;                      /* returns the number of threads to use */
  PyObject *error;                        /* class of the exception for a failed check */
  PyObject *messages;                     /* of the checks; the function returns the number of a failed one, from 1 */
} HostLauncher;

static PyObject *host_launcher_call(PyObject *object, PyObject *const *arguments, size_t flags, PyObject *keywords) {
  HostLauncher *self = (HostLauncher *)object;
  Py_ssize_t given = PyVectorcall_NARGS(flags);
  if ((keywords && PyTuple_GET_SIZE(keywords)) || given != self->pointers + self->sizes)
    return PyErr_Format(PyExc_TypeError, "%U takes %zd tensors and %zd sizes, not %zd arguments", self->name,
                        self->pointers, self->sizes, given);
  uint64_t words[given + 1];
  for (Py_ssize_t at = 0; at < given; ++at) {
    words[at] = at < self->pointers ? address_of(self->data_ptr, &arguments[at])
                                    : (uint64_t)PyLong_AsLongLong(arguments[at]);
    if (failed(words[at])) return NULL;
  }
  PyObject *threads = PyObject_CallNoArgs(self->threads);
  if (!threads) return NULL;
  words[given] = PyLong_AsUnsignedLongLong(threads);
  Py_DECREF(threads);
  if (failed(words[given])) return NULL;
  int check = 0;
  Py_BEGIN_ALLOW_THREADS /* gloo's callbacks and autograd's threads continue */
  check = self->function(words);
  Py_END_ALLOW_THREADS
  if (!check) Py_RETURN_NONE;
  PyObject *message = PySequence_GetItem(self->messages, check - 1);
  if (message) PyErr_SetObject(self->error, message);
  Py_XDECREF(message);
  return NULL;
}

static void host_launcher_free(PyObject *object) {
  HostLauncher *self = (HostLauncher *)object;
  Py_CLEAR(self->name);
  Py_CLEAR(self->data_ptr);
  Py_CLEAR(self->threads);
  Py_CLEAR(self->error);
  Py_CLEAR(self->messages);
  Py_TYPE(object)->tp_free(object);
}

static PyObject *host_launcher_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
  static char *names[] = {"name", "function", "pointers", "sizes", "data_ptr", "threads", "error", "messages", NULL};
  PyObject *name, *data_ptr, *threads, *error, *messages;
  Py_ssize_t pointers, sizes;
  unsigned long long function;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "UKnnOOOO!", names, &name, &function, &pointers, &sizes, &data_ptr,
                                   &threads, &error, &PyTuple_Type, &messages))
    return NULL;
  HostLauncher *self = (HostLauncher *)type->tp_alloc(type, 0);
  if (!self) return NULL;
  self->call = host_launcher_call;
  self->function = (int (*)(const uint64_t *))(uintptr_t)function;
  self->pointers = pointers;
  self->sizes = sizes;
  self->name = Py_NewRef(name);
  self->data_ptr = Py_NewRef(data_ptr);
  self->threads = Py_NewRef(threads);
  self->error = Py_NewRef(error);
  self->messages = Py_NewRef(messages);
  return (PyObject *)self;
}

static PyMemberDef host_launcher_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(HostLauncher, call), READONLY, NULL},
    {NULL},
};

static PyTypeObject HostLauncherType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "overlapc_launcher.HostLauncher",
    .tp_doc = "launcher(*tensors, *sizes) -> None",
    .tp_basicsize = sizeof(HostLauncher),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(HostLauncher, call),
    .tp_call = PyVectorcall_Call,
    .tp_new = host_launcher_new,
    .tp_dealloc = host_launcher_free,
    .tp_members = host_launcher_members,
};

static PyMethodDef functions[] = {
    {"open_driver", open_driver, METH_O, "open_driver(path) -> driver for `Launcher`; OSError if it is no CUDA driver"},
    {NULL},
};

static PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "overlapc_launcher", .m_size = -1,
                                 .m_methods = functions};

PyMODINIT_FUNC PyInit_overlapc_launcher(void) {
  PyObject *module = PyModule_Create(&definition);
  if (module && (PyModule_AddType(module, &LauncherType) || PyModule_AddType(module, &HostLauncherType)))
    Py_CLEAR(module);
  return module;
}
