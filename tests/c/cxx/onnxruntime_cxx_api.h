/* Stands in for ONNX Runtime's header of this name, which no package of Debian, PyPI or npm contains. It has the
 * members that docs/hosts.md uses, with the same signatures. A compiler that finds ONNX Runtime's own header uses that
 * one.
 */
#ifndef OCP_TEST_ONNXRUNTIME_CXX_API_H
#define OCP_TEST_ONNXRUNTIME_CXX_API_H

#include "base/ort_abi.h"

#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

extern "C" const OrtApiBase *OrtGetApiBase(void);

namespace Ort {

inline const OrtApi &GetApi() {
  static const OrtApi *api = OrtGetApiBase()->GetApi(OCP_OLDEST_API);
  return *api;
}

inline void ThrowOnError(OrtStatus *status) {
  if (!status)
    return;
  std::string message = GetApi().GetErrorMessage(status);
  GetApi().ReleaseStatus(status);
  throw std::runtime_error(message);
}

class ConstEpDevice {
public:
  explicit ConstEpDevice(const OrtEpDevice *device) : device_(device) {}
  operator const OrtEpDevice *() const { return device_; }
  const char *EpName() const { return GetApi().EpDevice_EpName(device_); }

private:
  const OrtEpDevice *device_;
};

class Env {
public:
  Env() { ThrowOnError(GetApi().CreateEnv(ORT_LOGGING_LEVEL_WARNING, "", &env_)); }
  ~Env() { GetApi().ReleaseEnv(env_); }
  Env(const Env &) = delete;
  Env &operator=(const Env &) = delete;
  operator OrtEnv *() const { return env_; }

  Env &RegisterExecutionProviderLibrary(const char *name, const std::string &path) {
    ThrowOnError(GetApi().RegisterExecutionProviderLibrary(env_, name, path.c_str()));
    return *this;
  }

  std::vector<ConstEpDevice> GetEpDevices() const {
    const OrtEpDevice *const *devices = nullptr;
    size_t count = 0;
    ThrowOnError(GetApi().GetEpDevices(env_, &devices, &count));
    std::vector<ConstEpDevice> result;
    for (size_t i = 0; i < count; i++)
      result.emplace_back(devices[i]);
    return result;
  }

private:
  OrtEnv *env_ = nullptr;
};

class SessionOptions {
public:
  SessionOptions() { ThrowOnError(GetApi().CreateSessionOptions(&options_)); }
  ~SessionOptions() { GetApi().ReleaseSessionOptions(options_); }
  SessionOptions(const SessionOptions &) = delete;
  SessionOptions &operator=(const SessionOptions &) = delete;
  operator const OrtSessionOptions *() const { return options_; }

  SessionOptions &AppendExecutionProvider_V2(Env &env, const std::vector<ConstEpDevice> &devices,
                                             const std::unordered_map<std::string, std::string> &options) {
    std::vector<const OrtEpDevice *> pointers(devices.begin(), devices.end());
    std::vector<const char *> keys, values;
    for (const auto &option : options) {
      keys.push_back(option.first.c_str());
      values.push_back(option.second.c_str());
    }
    ThrowOnError(GetApi().SessionOptionsAppendExecutionProvider_V2(options_, env, pointers.data(), pointers.size(),
                                                                   keys.data(), values.data(), keys.size()));
    return *this;
  }

private:
  OrtSessionOptions *options_ = nullptr;
};

class Session {
public:
  Session(const Env &env, const char *path, const SessionOptions &options) {
    ThrowOnError(GetApi().CreateSession(env, path, options, &session_));
  }
  ~Session() {
    if (session_)
      GetApi().ReleaseSession(session_);
  }
  Session(Session &&other) noexcept : session_(std::exchange(other.session_, nullptr)) {}
  Session &operator=(Session &&) = delete;
  operator const OrtSession *() const { return session_; }

  size_t GetInputCount() const {
    size_t count;
    ThrowOnError(GetApi().SessionGetInputCount(session_, &count));
    return count;
  }

private:
  OrtSession *session_ = nullptr;
};

} // namespace Ort

#endif
