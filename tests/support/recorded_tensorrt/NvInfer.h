// A stand-in for TensorRT's C++ API as examples/detect.cpp uses it: an "engine" is a recording of inputs and outputs.
//
// The file: lines "name is_input dtype dims...", an empty line, then records: the values of all tensors in this order.
// A query answers with the outputs of the record whose input it was given, up to one level of a pixel.
#pragma once
#include <cstdint>
#include <cmath>
#include <cstring>
#include <map>
#include <sstream>
#include <string>
#include <vector>

struct CUstream_st;

namespace nvinfer1 {

struct Dims {
    int32_t nbDims = 0;
    int64_t d[8] = {};
};
enum class DataType : int32_t { kFLOAT = 0, kHALF = 1, kINT8 = 2, kINT32 = 3, kBOOL = 4, kUINT8 = 5 };
enum class TensorIOMode : int32_t { kNONE = 0, kINPUT = 1, kOUTPUT = 2 };
enum class OptProfileSelector : int32_t { kMIN = 0, kOPT = 1, kMAX = 2 };

struct ILogger {
    enum class Severity : int32_t { kINTERNAL_ERROR, kERROR, kWARNING, kINFO, kVERBOSE };
    virtual void log(Severity severity, const char* text) noexcept = 0;
    virtual ~ILogger() = default;
};

struct Recorded {
    std::string name;
    bool input;
    DataType type;
    Dims dims;
    size_t bytes;
};

class IExecutionContext {
public:
    const std::vector<Recorded>* tensors;
    const char *records, *end;
    std::map<std::string, char*> addresses;
    bool setInputShape(const char*, const Dims&) { return true; }
    Dims getTensorShape(const char* name) const {
        for (const Recorded& one : *tensors)
            if (one.name == name) return one.dims;
        return {};
    }
    bool setTensorAddress(const char* name, void* address) { return (addresses[name] = static_cast<char*>(address)) != nullptr; }
    bool enqueueV3(CUstream_st*) {
        size_t size = 0;
        for (const Recorded& one : *tensors) size += one.bytes;
        for (const char* record = records; record + size <= end; record += size)
            if (answers(record)) return true;
        return false;
    }

private:
    bool answers(const char* record) {
        const char* place = record;
        for (const Recorded& one : *tensors) {
            if (one.input && !same(one, place)) return false;
            place += one.bytes;
        }
        place = record;
        for (const Recorded& one : *tensors) {
            if (!one.input) std::memcpy(addresses.at(one.name), place, one.bytes);
            place += one.bytes;
        }
        return true;
    }
    bool same(const Recorded& tensor, const char* expected) {
        const char* found = addresses.at(tensor.name);
        if (tensor.type == DataType::kUINT8) {
            for (size_t i = 0; i < tensor.bytes; ++i)
                if (std::abs(int(uint8_t(found[i])) - int(uint8_t(expected[i]))) > 1) return false;
            return true;
        }
        for (size_t i = 0; i < tensor.bytes; i += 4) {
            float a, b;
            std::memcpy(&a, found + i, 4);
            std::memcpy(&b, expected + i, 4);
            if (!(std::fabs(a - b) < 1.01f / 255)) return false;
        }
        return true;
    }
};

class ICudaEngine {
public:
    std::vector<Recorded> tensors;
    std::string records;
    int32_t getNbIOTensors() const { return int32_t(tensors.size()); }
    const char* getIOTensorName(int32_t index) const { return tensors[index].name.c_str(); }
    const Recorded& at(const char* name) const {
        for (const Recorded& one : tensors)
            if (one.name == name) return one;
        throw name;
    }
    TensorIOMode getTensorIOMode(const char* name) const { return at(name).input ? TensorIOMode::kINPUT : TensorIOMode::kOUTPUT; }
    Dims getTensorShape(const char* name) const { return at(name).dims; }
    Dims getProfileShape(const char* name, int32_t, OptProfileSelector) const { return at(name).dims; }
    DataType getTensorDataType(const char* name) const { return at(name).type; }
    IExecutionContext* createExecutionContext() {
        auto* context = new IExecutionContext();
        context->tensors = &tensors;
        context->records = records.data();
        context->end = records.data() + records.size();
        return context;
    }
};

class IRuntime {
public:
    ICudaEngine* deserializeCudaEngine(const void* data, size_t size) {
        auto* engine = new ICudaEngine();
        std::istringstream text(std::string(static_cast<const char*>(data), size));
        for (std::string line; std::getline(text, line) && !line.empty();) {
            std::istringstream words(line);
            Recorded tensor{};
            int type = 0;
            words >> tensor.name >> tensor.input >> type;
            tensor.type = DataType(type);
            tensor.bytes = tensor.type == DataType::kUINT8 ? 1 : 4;
            for (int64_t length; words >> length; tensor.bytes *= length) tensor.dims.d[tensor.dims.nbDims++] = length;
            engine->tensors.push_back(tensor);
        }
        if (engine->tensors.empty()) return delete engine, nullptr;
        engine->records.assign(std::istreambuf_iterator<char>(text), {});
        return engine;
    }
};

inline IRuntime* createInferRuntime(ILogger&) { return new IRuntime(); }

}  // namespace nvinfer1
