// A stand-in for CUDA's runtime as examples/detect.cpp uses it: device memory is host memory.
#pragma once
#include <cstdlib>
#include <cstring>
using cudaError_t = int;
struct CUstream_st {};
using cudaStream_t = CUstream_st*;
enum { cudaSuccess = 0 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2 };
inline const char* cudaGetErrorString(cudaError_t) { return "an error"; }
inline cudaError_t cudaStreamCreate(cudaStream_t* stream) { return *stream = new CUstream_st, 0; }
inline cudaError_t cudaStreamDestroy(cudaStream_t stream) { return delete stream, 0; }
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return 0; }
inline cudaError_t cudaMalloc(void** address, size_t bytes) { return *address = std::malloc(bytes), 0; }
inline cudaError_t cudaFree(void* address) { return std::free(address), 0; }
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
    return std::memcpy(to, from, bytes), 0;
}
