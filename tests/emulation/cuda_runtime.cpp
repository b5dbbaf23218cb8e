// In the place of the CUDA runtime, for host code that runs on the CPU: a launch goes to a function of Python's, with
// whatever tensors the host code has asked the address of since it began. There is no device and no stream.

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

struct Dim {
  unsigned x, y, z;
};
struct AtenTensorOpaque;

namespace {

// The launch's kernel, grid and block (three numbers each), arguments, and bytes of shared memory. Not 0: a fault.
using Launch = int (*)(const char*, const unsigned*, const unsigned*, void**, size_t);
// A tensor's address, bytes an element, dimensions, sizes and strides in elements. No dimensions, no address: forget all.
using Seen = void (*)(void*, int64_t, int64_t, const int64_t*, const int64_t*);

Launch launch;
Seen seen;
std::map<const void*, std::string>& kernels() {  // made at first use: kernels register before main
  static std::map<const void*, std::string> names;
  return names;
}
struct {
  Dim grid, block;
  size_t shared;
  void* stream;
} pushed;
int error = 0;

}  // namespace

extern "C" {

void emulate(Launch on_launch, Seen on_seen) {
  launch = on_launch;
  seen = on_seen;
}

void** __cudaRegisterFatBinary(void*) { return nullptr; }
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*, int*) {
  kernels()[host] = name;
}

unsigned __cudaPushCallConfiguration(Dim grid, Dim block, size_t shared, void* stream) {
  pushed = {grid, block, shared, stream};
  return 0;
}

int __cudaPopCallConfiguration(Dim* grid, Dim* block, size_t* shared, void** stream) {
  *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared, *stream = pushed.stream;
  return 0;
}

int __cudaGetKernel(const void** kernel, const void* host) {
  *kernel = host;
  return 0;
}

int __cudaLaunchKernel(const void* kernel, Dim grid, Dim block, void** arguments, size_t shared, void*) {
  return error = launch(kernels().at(kernel).c_str(), &grid.x, &block.x, arguments, shared);
}

int cudaGetLastError() {
  const int last = error;
  error = 0;
  return last;
}

int cudaDeviceGetAttribute(int* value, int, int) {  // of multiprocessors: blocks of the backward pass walk on
  *value = 1;
  return 0;
}

int torch_c10_cuda_check_msg(int code, const char*, const char*, uint32_t, bool, char** message) {
  *message = code == 0 ? nullptr : strdup("the kernel has a fault");
  return 0;
}

void torch_c10_cuda_free_error_msg(char* message) { std::free(message); }

int aoti_torch_get_current_cuda_stream(int, void** stream) {
  *stream = nullptr;
  return 0;
}

int aoti_torch_create_device_guard(int, void** guard) {  // an op begins
  seen(nullptr, 0, 0, nullptr, nullptr);
  *guard = nullptr;
  return 0;
}

int aoti_torch_delete_device_guard(void*) { return 0; }

int aoti_torch_get_dim(AtenTensorOpaque*, int64_t*);
int aoti_torch_get_sizes(AtenTensorOpaque*, int64_t**);
int aoti_torch_get_strides(AtenTensorOpaque*, int64_t**);
int aoti_torch_get_dtype(AtenTensorOpaque*, int*);
size_t aoti_torch_dtype_element_size(int);
int __real_aoti_torch_get_data_ptr(AtenTensorOpaque*, void**);

int __wrap_aoti_torch_get_data_ptr(AtenTensorOpaque* tensor, void** data) {
  int64_t dimensions = 0, *sizes = nullptr, *strides = nullptr;
  int type = 0;
  const int code = __real_aoti_torch_get_data_ptr(tensor, data) || aoti_torch_get_dim(tensor, &dimensions) ||
                   aoti_torch_get_sizes(tensor, &sizes) || aoti_torch_get_strides(tensor, &strides) ||
                   aoti_torch_get_dtype(tensor, &type);
  if (code == 0) seen(*data, aoti_torch_dtype_element_size(type), dimensions, sizes, strides);
  return code;
}

}  // extern "C"
