/* Finds Python and loads the package into it.
 *
 * A Python process has an interpreter already. Elsewhere the library starts the interpreter of the environment in
 * which it is installed, else the one that ORT_CUDA_PLUGIN_PYTHON names. All functions are looked up by name at run
 * time: the library is linked to no libpython, and works with every Python from 3.11 on. */
#define _GNU_SOURCE
#include "python/start.h"

#include <dlfcn.h>
#include <limits.h>
#include <link.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <wchar.h>

#include "base/host.h"

enum { PY_FILE_INPUT = 257 };

typedef struct PyObject PyObject;

/* Functions of Python's stable ABI, under their own names. Those from Py_DecodeLocale on may be NULL: not every version
 * of Python has them. */
typedef struct python_api {
  int (*Py_IsInitialized)(void);
  int (*PyGILState_Ensure)(void);
  void (*PyGILState_Release)(int state);
  void *(*PyEval_SaveThread)(void);
  PyObject *(*PyDict_New)(void);
  int (*PyDict_SetItemString)(PyObject *dict, const char *key, PyObject *value);
  PyObject *(*PyDict_GetItemString)(PyObject *dict, const char *key);
  PyObject *(*PyLong_FromUnsignedLongLong)(unsigned long long value);
  PyObject *(*PyUnicode_DecodeFSDefault)(const char *text);
  const char *(*PyUnicode_AsUTF8AndSize)(PyObject *text, ptrdiff_t *size);
  PyObject *(*Py_CompileString)(const char *text, const char *file, int start);
  PyObject *(*PyEval_EvalCode)(PyObject *code, PyObject *globals, PyObject *locals);
  void (*Py_DecRef)(PyObject *object);
  void (*PyErr_Clear)(void);
  wchar_t *(*Py_DecodeLocale)(const char *text, size_t *size);
  void (*Py_SetProgramName)(const wchar_t *name);
  void (*Py_InitializeEx)(int install_signal_handlers);
  void *(*PyInitConfig_Create)(void);
  void (*PyInitConfig_Free)(void *config);
  int (*PyInitConfig_SetInt)(void *config, const char *name, int64_t value);
  int (*PyInitConfig_SetStr)(void *config, const char *name, const char *value);
  int (*PyInitConfig_GetError)(void *config, const char **message);
  int (*Py_InitializeFromInitConfig)(void *config);
} python_api;

static const char *const names[] = {
    "Py_IsInitialized",
    "PyGILState_Ensure",
    "PyGILState_Release",
    "PyEval_SaveThread",
    "PyDict_New",
    "PyDict_SetItemString",
    "PyDict_GetItemString",
    "PyLong_FromUnsignedLongLong",
    "PyUnicode_DecodeFSDefault",
    "PyUnicode_AsUTF8AndSize",
    "Py_CompileString",
    "PyEval_EvalCode",
    "Py_DecRef",
    "PyErr_Clear",
    "Py_DecodeLocale",
    "Py_SetProgramName",
    "Py_InitializeEx",
    "PyInitConfig_Create",
    "PyInitConfig_Free",
    "PyInitConfig_SetInt",
    "PyInitConfig_SetStr",
    "PyInitConfig_GetError",
    "Py_InitializeFromInitConfig",
};
enum {
  NUM_NAMES = sizeof names / sizeof *names,
  NUM_REQUIRED = offsetof(python_api, Py_DecodeLocale) / sizeof(void *)
};
_Static_assert(sizeof(python_api) == NUM_NAMES * sizeof(void *), "one name per member");

/* Loads the package that contains the library, by path, so that no other copy of the package is imported. A library
 * that was copied out of its package loads the installed package.
 *
 * If this file started Python (`started`), the script keeps Python from changing the actions of signals:
 *   SIGINT: Python's module _signal replaces the default action, even though Py_InitializeEx got 0. Ctrl-C would then
 *     raise KeyboardInterrupt in a callback and not end the process. The script sets the default action again.
 *   SIGWINCH: the module readline, which cuda.core imports, replaces the application's handler. The script makes the
 *     import of readline fail, as on a system without it.
 *
 * Python then does not search the user's site-packages either. If the package is installed there, its dependencies are
 * there too, so the script adds that folder to sys.path. The folder comes before the system's packages, whose versions
 * can differ: a Python that searches the user's site-packages has the same order. */
static const char bootstrap[] =
    "try:\n"
    "    import sys, os\n"
    "    if started:\n"
    "        import _signal\n"
    "        if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:\n"
    "            _signal.signal(_signal.SIGINT, _signal.SIG_DFL)\n"
    "        sys.modules['readline'] = None\n"
    "    packages = os.path.dirname(folder)\n"
    "    if started and packages.endswith(('/site-packages', '/dist-packages')) and packages not in sys.path:\n"
    "        import site\n"
    "        others = list(sys.path)\n"
    "        site.addsitedir(packages)\n"
    "        users = [path for path in sys.path if path not in others]\n"
    "        systems = (at for at, path in enumerate(others) if path.endswith(('/site-packages', '/dist-packages')))\n"
    "        first = next(systems, len(others))\n"
    "        sys.path[:] = others[:first] + users + others[first:]\n"
    "    start = os.path.join(folder, '__init__.py')\n"
    "    if 'ort_cuda_plugin' not in sys.modules and os.path.exists(start):\n"
    "        from importlib import util\n"
    "        spec = util.spec_from_file_location('ort_cuda_plugin', start, submodule_search_locations=[folder])\n"
    "        module = util.module_from_spec(spec)\n"
    "        sys.modules['ort_cuda_plugin'] = module\n"
    "        try:\n"
    "            spec.loader.exec_module(module)\n"
    "        except BaseException:\n"
    "            del sys.modules['ort_cuda_plugin']\n"
    "            raise\n"
    "    from ort_cuda_plugin.uninterrupted import imported\n"
    "    imported('ort_cuda_plugin.ep.boundary').attach(address)\n"
    "except BaseException as error:\n"
    "    message = f'{type(error).__name__}: {error} (Python {sys.version.split()[0]} of {sys.prefix})'\n";

static bool resolve(void *library, python_api *api) {
  void **members = (void **)(void *)api;
  for (int i = 0; i < NUM_NAMES; i++) {
    members[i] = dlsym(library, names[i]);
    if (!members[i] && i < NUM_REQUIRED)
      return false;
  }
  return true;
}

/* ---- a Python that the process has loaded ---- */

static int find_libpython(struct dl_phdr_info *info, size_t size, void *path) {
  (void)size;
  const char *base = strrchr(info->dlpi_name, '/');
  if (!base || strncmp(base, "/libpython3", 11) != 0 || strncmp(base, "/libpython3.so", 14) == 0)
    return 0;
  snprintf(path, PATH_MAX, "%s", info->dlpi_name);
  return 1;
}

/* Finds the functions of a Python that the process has loaded. If the symbols of its libpython are not global, makes
 * them global, because extension modules need them. */
static bool use_loaded_python(python_api *api) {
  if (resolve(RTLD_DEFAULT, api))
    return true;
  char path[PATH_MAX];
  void *library = dl_iterate_phdr(find_libpython, path) ? dlopen(path, RTLD_NOW | RTLD_GLOBAL | RTLD_NOLOAD) : NULL;
  return library && resolve(library, api);
}

/* ---- a Python that the library starts ---- */

static bool exists(const char *path) { return access(path, X_OK) == 0; }

static void parent(char *path) {
  char *slash = strrchr(path, '/');
  *(slash ? slash : path) = '\0';
}

/* Whether the library may run an interpreter: `path` must belong to root, to this user or to the package's owner, and
 * must not be writable by all users. Otherwise the library could run an interpreter that another user has put into a
 * folder above the package, as any user can in /tmp. */
static bool belongs_to_us(const char *path, const char *package) {
  struct stat status, ours;
  return lstat(path, &status) == 0 && stat(package, &ours) == 0 &&
         (status.st_uid == 0 || status.st_uid == geteuid() || status.st_uid == ours.st_uid) &&
         (S_ISLNK(status.st_mode) || !(status.st_mode & S_IWOTH));
}

static bool in_prefix(const char *prefix, const char *place, const char *package, char interpreter[PATH_MAX]) {
  char bin[PATH_MAX];
  if (snprintf(interpreter, PATH_MAX, "%s/%s", prefix, place) >= PATH_MAX || !exists(interpreter))
    return false;
  snprintf(bin, sizeof bin, "%s", interpreter);
  parent(bin);
  return belongs_to_us(bin, package) && belongs_to_us(interpreter, package);
}

/* Finds the interpreter of the environment in which the package in `folder` is installed: <env>/bin/python3, where
 * <env> contains the package's site-packages or dist-packages, or is .venv next to the package in a source tree. */
static bool find_interpreter(const char *folder, char interpreter[PATH_MAX]) {
  char prefix[PATH_MAX];
  snprintf(prefix, sizeof prefix, "%s", folder);
  parent(prefix);
  const char *base = strrchr(prefix, '/');
  if (!base || (strcmp(base, "/site-packages") != 0 && strcmp(base, "/dist-packages") != 0))
    return in_prefix(prefix, ".venv/bin/python3", folder, interpreter);
  for (parent(prefix); prefix[0]; parent(prefix))
    if (in_prefix(prefix, "bin/python3", folder, interpreter))
      return true;
  return false;
}

/* Finds the "3.N" in an interpreter's real path .../bin/python3.N; false for other paths, and below 3.11. */
static bool version_of(const char *real, char version[16]) {
  const char *base = strrchr(real, '/');
  base = base ? base + 1 : real;
  if (strncmp(base, "python3.", 8) != 0 || strspn(base + 8, "0123456789") == 0)
    return false;
  snprintf(version, 16, "3.%.*s", (int)strspn(base + 8, "0123456789"), base + 8);
  return strtoul(base + 8, NULL, 10) >= 11;
}

static void *open_libpython(const char *interpreter, ocp_error *error) {
  char real[PATH_MAX], version[16], path[PATH_MAX + 64];
  if (!realpath(interpreter, real) || !version_of(real, version)) {
    ocp_fail(
        error, ORT_FAIL,
        "%s: expected an interpreter of Python 3.11 or newer, in a file with the name python3.N or a link to such a "
        "file. Install the package into an environment of such an interpreter",
        interpreter);
    return NULL;
  }
  parent(real);
  parent(real); /* `real` is now the interpreter's prefix */
  static const char *const folders[] = {"%s/lib/libpython%s.so.1.0", "%s/lib64/libpython%s.so.1.0",
                                        "%s/lib/x86_64-linux-gnu/libpython%s.so.1.0",
                                        "%s/lib/aarch64-linux-gnu/libpython%s.so.1.0", "%.0slibpython%s.so.1.0"};
  void *library = NULL;
  for (size_t i = 0; !library && i < sizeof folders / sizeof *folders; i++) {
    snprintf(path, sizeof path, folders[i], real, version);
    library = dlopen(path, RTLD_NOW | RTLD_GLOBAL);
  }
  if (!library)
    ocp_fail(
        error, ORT_FAIL,
        "Python at %s has no shared library libpython%s.so.1.0 (Debian, Ubuntu: install libpython%s; others: build "
        "Python with --enable-shared)",
        interpreter, version, version);
  return library;
}

static int initialize_by_config(const python_api *api, const char *interpreter, ocp_error *error) {
  void *config = api->PyInitConfig_Create();
  if (!config || api->PyInitConfig_SetInt(config, "use_environment", 0) ||
      api->PyInitConfig_SetInt(config, "install_signal_handlers", 0) ||
      api->PyInitConfig_SetStr(config, "program_name", interpreter) || api->Py_InitializeFromInitConfig(config)) {
    const char *message = OCP_OUT_OF_HOST_MEMORY;
    if (config)
      api->PyInitConfig_GetError(config, &message);
    ocp_fail(error, ORT_FAIL, "cannot start Python at %s: %s", interpreter, message);
  }
  api->PyInitConfig_Free(config);
  return error->code;
}

/* Starts Python isolated, like `python -I`: it ignores PYTHON* variables and the user's site-packages. The program name
 * decides prefix and site-packages. The layout of PyConfig differs between versions, so this uses the older functions,
 * or in versions without them PyInitConfig, which is isolated by default. */
static int initialize(const python_api *api, const char *interpreter, ocp_error *error) {
  if (!api->Py_DecodeLocale || !api->Py_SetProgramName || !api->Py_InitializeEx)
    return api->PyInitConfig_Create
               ? initialize_by_config(api, interpreter, error)
               : ocp_fail(error, ORT_FAIL,
                          "Python at %s lacks functions of the C API that start Python. Use CPython 3.11 or newer",
                          interpreter);
  static const char *const flags[] = {"Py_IsolatedFlag", "Py_IgnoreEnvironmentFlag", "Py_NoUserSiteDirectory"};
  for (size_t i = 0; i < sizeof flags / sizeof *flags; i++) {
    int *flag = dlsym(RTLD_DEFAULT, flags[i]);
    if (!flag)
      return ocp_fail(error, ORT_FAIL, "Python at %s lacks the variable %s of the C API. Use CPython 3.11 or newer",
                      interpreter, flags[i]);
    *flag = 1;
  }
  wchar_t *name = api->Py_DecodeLocale(interpreter, NULL); /* kept: Python refers to it */
  if (!name)
    return ocp_fail(error, ORT_FAIL, "cannot decode the path of the Python interpreter: %s", interpreter);
  api->Py_SetProgramName(name);
  api->Py_InitializeEx(0);
  return ORT_OK;
}

static int start_own_python(python_api *api, const char *folder, ocp_error *error) {
  char interpreter[PATH_MAX];
  if (!find_interpreter(folder, interpreter)) {
    const char *configured = secure_getenv("ORT_CUDA_PLUGIN_PYTHON");
    if (!configured || !configured[0])
      return ocp_fail(
          error, ORT_FAIL,
          "found no Python for %s: %s is in no Python environment whose interpreter belongs to root, this user or the "
          "package's owner. Install the package into an environment, or set ORT_CUDA_PLUGIN_PYTHON to the interpreter "
          "of an environment that has the package",
          OCP_EP_NAME, folder);
    if (configured[0] != '/')
      return ocp_fail(error, ORT_FAIL,
                      "ORT_CUDA_PLUGIN_PYTHON: %s is not an absolute path, and the working folder is not trusted. Set "
                      "an absolute path",
                      configured);
    if (!exists(configured))
      return ocp_fail(error, ORT_FAIL,
                      "ORT_CUDA_PLUGIN_PYTHON: %s cannot be executed. Set the path of a Python interpreter",
                      configured);
    snprintf(interpreter, sizeof interpreter, "%s", configured);
  }
  void *library = open_libpython(interpreter, error);
  if (!library)
    return error->code;
  if (!resolve(library, api))
    return ocp_fail(error, ORT_FAIL, "Python at %s lacks functions of the stable ABI. Use CPython 3.11 or newer",
                    interpreter);
  if (initialize(api, interpreter, error) != ORT_OK)
    return error->code;
  api->PyEval_SaveThread(); /* releases the GIL; every later use acquires it */
  return ORT_OK;
}

static int load_package(const python_api *api, const ocp_core *core, const char *folder, bool started,
                        ocp_error *error) {
  int state = api->PyGILState_Ensure();
  PyObject *globals = api->PyDict_New();
  PyObject *path = api->PyUnicode_DecodeFSDefault(folder);
  PyObject *address = api->PyLong_FromUnsignedLongLong((uintptr_t)core);
  PyObject *flag = api->PyLong_FromUnsignedLongLong(started);
  PyObject *code = api->Py_CompileString(bootstrap, "<libort_cuda_plugin.so>", PY_FILE_INPUT);
  PyObject *result = NULL;
  if (globals && path && address && flag && code && api->PyDict_SetItemString(globals, "folder", path) == 0 &&
      api->PyDict_SetItemString(globals, "address", address) == 0 &&
      api->PyDict_SetItemString(globals, "started", flag) == 0)
    result = api->PyEval_EvalCode(code, globals, globals);
  PyObject *message = result ? api->PyDict_GetItemString(globals, "message") : NULL;
  if (!result || message) {
    const char *text = message ? api->PyUnicode_AsUTF8AndSize(message, NULL) : NULL;
    ocp_fail(error, ORT_FAIL, "cannot load the Python package of %s: %s", OCP_EP_NAME,
             text ? text : OCP_OUT_OF_HOST_MEMORY);
  }
  api->PyErr_Clear();
  PyObject *const owned[] = {globals, path, address, flag, code, result};
  for (size_t i = 0; i < sizeof owned / sizeof *owned; i++)
    if (owned[i])
      api->Py_DecRef(owned[i]);
  api->PyGILState_Release(state);
  return error->code;
}

static _Atomic(const ocp_core *) prepared;
static atomic_bool is_ready;
static atomic_bool is_our_own; /* true: this file started Python, so no thread calls ORT while it holds the GIL */

bool ocp_python_is_ready(void) { return atomic_load(&is_ready); }

void ocp_python_set_ready(void) { atomic_store(&is_ready, true); }

static int find_folder(char folder[PATH_MAX], ocp_error *error) {
  Dl_info info;
  if (!dladdr(bootstrap, &info) || !realpath(info.dli_fname, folder))
    return ocp_fail(error, ORT_FAIL, "%s: the dynamic loader does not tell the path of libort_cuda_plugin.so",
                    OCP_EP_NAME);
  parent(folder);
  return ORT_OK;
}

int ocp_python_prepare(const ocp_core *core, ocp_error *error) {
  atomic_store(&prepared, core);
  if (ocp_python_is_ready())
    return ORT_OK;
  /* Locked only while the process has no Python, so no thread that waits for the lock holds the GIL. */
  static pthread_mutex_t starting = PTHREAD_MUTEX_INITIALIZER;
  python_api api;
  if (!atomic_load(&is_our_own) && use_loaded_python(&api) && api.Py_IsInitialized())
    return ORT_OK;
  bool started = false;
  char folder[PATH_MAX];
  if (find_folder(folder, error) != ORT_OK)
    return error->code;
  pthread_mutex_lock(&starting);
  if (!use_loaded_python(&api) || !api.Py_IsInitialized()) {
    started = start_own_python(&api, folder, error) == ORT_OK;
    atomic_store(&is_our_own, started);
  }
  pthread_mutex_unlock(&starting);
  return error->code ? error->code : load_package(&api, core, folder, started, error);
}

int ocp_python_load(ocp_error *error) {
  python_api api;
  const ocp_core *core = atomic_load(&prepared);
  char folder[PATH_MAX];
  if (!core || !use_loaded_python(&api) || !api.Py_IsInitialized())
    return ocp_fail(error, ORT_FAIL,
                    "%s: Python does not run in this process. Register the library with ONNX Runtime before its use, "
                    "and do not end Python before ONNX Runtime",
                    OCP_EP_NAME);
  return find_folder(folder, error) == ORT_OK ? load_package(&api, core, folder, /*started=*/false, error)
                                              : error->code;
}
