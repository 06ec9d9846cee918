// Detect objects with a YOLOv9 engine by TensorRT 8.6 or newer, CUDA's runtime and OpenCV 4: nothing of this project.
//     g++ -std=c++17 -O2 detect.cpp -o detect $(pkg-config --cflags --libs opencv4) -I/usr/local/cuda/include
//         -L/usr/local/cuda/lib64 -lnvinfer -lnvinfer_plugin -lcudart    (one line)
//     ./detect yolov9-c-int8.engine images/ drawn    # an image or a folder of images; where to draw them
// Copy this file into your product, which needs `Detector` alone. Class names are those of ENGINE.json, which
// scripts/build_engine.py writes beside the engine. Masks of a segmentation network are left out.

#include <NvInfer.h>
#include <NvInferPlugin.h>
#include <cuda_runtime_api.h>
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <numeric>
#include <opencv2/opencv.hpp>
#include <regex>

namespace fs = std::filesystem;

struct Detection {
    cv::Rect2f box;  // pixels of the image
    float score;
    int label;
};

struct Letterboxed {
    cv::Mat pixels;               // uint8 RGB, of the input's size
    cv::Point2f ratio, corner;    // input / image; pixels of the input
};

const std::map<nvinfer1::DataType, int> matrix_types{
    {nvinfer1::DataType::kFLOAT, CV_32F}, {nvinfer1::DataType::kHALF, CV_16F},
    {nvinfer1::DataType::kINT32, CV_32S}, {nvinfer1::DataType::kUINT8, CV_8U}};

void check(cudaError_t code) {
    if (code != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(code));
}

std::string read_file(const fs::path& path) {
    std::ifstream file(path, std::ios::binary);
    if (!file) throw std::runtime_error("cannot read " + path.string());
    return {std::istreambuf_iterator<char>(file), {}};
}

// Fit an image (uint8 BGR) into the input as in training and evaluation: its aspect ratio stays, grey is around it.
Letterboxed letterbox(const cv::Mat& image, cv::Size size) {
    const double ratio = std::min(double(size.height) / image.rows, double(size.width) / image.cols);
    const int height = std::max(int(image.rows * ratio), 1), width = std::max(int(image.cols * ratio), 1);
    cv::Mat resized;
    cv::resize(image, resized, {width, height}, 0, 0, ratio > 1 ? cv::INTER_LINEAR : cv::INTER_AREA);
    const double x = (size.width - width) / 2.0, y = (size.height - height) / 2.0;
    cv::Mat pixels(size, CV_8UC3, cv::Scalar::all(114));
    const cv::Rect place(int(std::lround(x - 0.1)), int(std::lround(y - 0.1)), width, height);
    cv::cvtColor(resized, pixels(place), cv::COLOR_BGR2RGB);
    return {pixels, {float(width) / image.cols, float(height) / image.rows}, {float(x), float(y)}};
}

// The detections that stay, the best first: of two of a class that overlap by more than `iou` the better one.
std::vector<Detection> nms(std::vector<Detection> candidates, float iou, bool across_classes) {
    std::stable_sort(candidates.begin(), candidates.end(), [](auto& a, auto& b) { return a.score > b.score; });
    std::vector<Detection> detections;
    for (const Detection& next : candidates) {
        const auto suppresses = [&](const Detection& better) {
            const float both = (better.box & next.box).area(), either = better.box.area() + next.box.area() - both;
            return (across_classes || better.label == next.label) && both > iou * either;
        };
        if (std::none_of(detections.begin(), detections.end(), suppresses)) detections.push_back(next);
        if (detections.size() == 300) break;
    }
    return detections;
}

// An engine on the current GPU, for one image at a time, at the size that it was optimised for.
class Detector {
public:
    std::map<int, std::string> names;  // of the classes
    float conf, iou;                   // least score; NMS drops boxes above `iou` (an engine with NMS has its own)

    explicit Detector(const fs::path& path, float conf = 0.25f, float iou = 0.45f) : conf(conf), iou(iou) {
        read_names(path.string() + ".json");
        initLibNvInferPlugins(&logger_, "");  // EfficientNMS
        const std::string plan = read_file(path);
        runtime_.reset(nvinfer1::createInferRuntime(logger_));
        engine_.reset(runtime_->deserializeCudaEngine(plan.data(), plan.size()));
        if (!engine_) throw std::runtime_error(path.string() + " was not built by this TensorRT for this GPU");
        context_.reset(engine_->createExecutionContext());
        check(cudaStreamCreate(&stream_));
        for (int index = 0; index < engine_->getNbIOTensors(); ++index) {
            const std::string name = engine_->getIOTensorName(index);
            if (engine_->getTensorIOMode(name.c_str()) == nvinfer1::TensorIOMode::kINPUT) input_ = name;
            tensors_[name] = {};
        }
        if (!tensors_.count("num_dets") && !tensors_.count("output0"))
            throw std::runtime_error(path.string() + " has no num_dets or output0; build from a file of export_qat.py");
        nvinfer1::Dims shape = engine_->getTensorShape(input_.c_str());
        if (std::count(shape.d, shape.d + shape.nbDims, -1)) {
            shape = engine_->getProfileShape(input_.c_str(), 0, nvinfer1::OptProfileSelector::kOPT);
            shape.d[0] = engine_->getProfileShape(input_.c_str(), 0, nvinfer1::OptProfileSelector::kMIN).d[0];
        }
        context_->setInputShape(input_.c_str(), shape);
        nhwc_ = shape.d[3] == 3 || shape.d[3] == 1;
        grey_ = shape.d[nhwc_ ? 3 : 1] == 1;
        size_ = nhwc_ ? cv::Size(shape.d[2], shape.d[1]) : cv::Size(shape.d[3], shape.d[2]);
        for (auto& [name, tensor] : tensors_) {
            const nvinfer1::Dims dims = context_->getTensorShape(name.c_str());
            tensor.shape.assign(dims.d, dims.d + dims.nbDims);
            const int count = std::accumulate(dims.d, dims.d + dims.nbDims, 1, std::multiplies<>());
            tensor.host.create(1, count, matrix_types.at(engine_->getTensorDataType(name.c_str())));
            check(cudaMalloc(&tensor.device, tensor.bytes()));
            context_->setTensorAddress(name.c_str(), tensor.device);
        }
    }

    ~Detector() {
        for (auto& [name, tensor] : tensors_) cudaFree(tensor.device);
        cudaStreamDestroy(stream_);
    }

    // Detections in an image (uint8 BGR, as OpenCV reads it), the best first.
    std::vector<Detection> operator()(const cv::Mat& image) {
        const auto [pixels, ratio, corner] = letterbox(image, size_);
        infer(pixels);
        std::vector<Detection> detections = tensors_.count("num_dets") ? read_detections() : decode();
        for (auto& [box, score, label] : detections) {
            const cv::Point2f place = box.tl() - corner;
            box = {place.x / ratio.x, place.y / ratio.y, box.width / ratio.x, box.height / ratio.y};
            box &= cv::Rect2f({}, image.size());
        }
        return nms(std::move(detections), 0.45f, true);  // boxes of several classes at one place are one object
    }

private:
    struct Tensor {
        std::vector<int> shape;
        cv::Mat host;  // [1, number of elements]
        void* device = nullptr;
        size_t bytes() const { return host.total() * host.elemSize(); }
    };

    struct Logger : nvinfer1::ILogger {
        void log(Severity severity, const char* text) noexcept override {
            if (severity <= Severity::kWARNING) std::fprintf(stderr, "TensorRT: %s\n", text);
        }
    } logger_;

    std::unique_ptr<nvinfer1::IRuntime> runtime_;  // destroyed last
    std::unique_ptr<nvinfer1::ICudaEngine> engine_;
    std::unique_ptr<nvinfer1::IExecutionContext> context_;
    cudaStream_t stream_ = nullptr;
    std::map<std::string, Tensor> tensors_;
    std::string input_;
    cv::Size size_;
    bool nhwc_ = false, grey_ = false;

    // "names" in the metadata of ENGINE.json is JSON in a string: {\"0\": \"person\", ...}
    void read_names(const fs::path& path) {
        if (!fs::exists(path)) return;
        const std::string text = read_file(path);
        if (text.find("strip_weights\": true") != text.npos) throw std::runtime_error("build without --strip-weights");
        const std::regex entry(R"re(\\"(\d+)\\":\s*\\"(.*?)\\")re");
        for (std::sregex_iterator match(text.begin(), text.end(), entry), end; match != end; ++match)
            names[std::stoi((*match)[1])] = (*match)[2];
    }

    void infer(cv::Mat pixels) {
        Tensor& input = tensors_.at(input_);
        if (grey_) cv::cvtColor(pixels, pixels, cv::COLOR_RGB2GRAY);
        const cv::Mat blob = nhwc_ ? pixels : cv::dnn::blobFromImage(pixels, 1, {}, {}, false, false, CV_8U);
        cv::Mat one(1, pixels.channels() * int(pixels.total()), CV_8U, blob.data);
        one.convertTo(one, input.host.type(), input.host.type() == CV_8U ? 1 : 1 / 255.0);
        cv::repeat(one, 1, input.shape[0], input.host);  // the same for each image of a static batch
        check(cudaMemcpyAsync(input.device, input.host.data, input.bytes(), cudaMemcpyHostToDevice, stream_));
        if (!context_->enqueueV3(stream_)) throw std::runtime_error("TensorRT could not run the engine");
        for (auto& [name, out] : tensors_)
            if (name != input_)
                check(cudaMemcpyAsync(out.host.data, out.device, out.bytes(), cudaMemcpyDeviceToHost, stream_));
        check(cudaStreamSynchronize(stream_));
    }

    cv::Mat values(const std::string& name) {  // of the first image, as float [1, number of elements]
        const Tensor& tensor = tensors_.at(name);
        cv::Mat converted;
        tensor.host.colRange(0, tensor.host.cols / tensor.shape[0]).convertTo(converted, CV_32F);
        return converted;
    }

    // Of an engine with NMS inside; corners are pixels of the input.
    std::vector<Detection> read_detections() {
        const cv::Mat boxes = values("det_boxes"), scores = values("det_scores"), labels = values("det_classes");
        std::vector<Detection> detections;
        for (int row = 0, count = int(values("num_dets").at<float>(0)); row < count; ++row) {
            const float *box = boxes.ptr<float>() + 4 * row, score = scores.at<float>(row);
            const int label = int(labels.at<float>(row));
            if (score > conf) detections.push_back({{box[0], box[1], box[2] - box[0], box[3] - box[1]}, score, label});
        }
        return detections;
    }

    // The same of raw predictions [4 + classes + masks, anchors] (cx, cy, w, h, scores), by NMS of each class.
    std::vector<Detection> decode() {
        const auto prototypes = tensors_.find("output1");
        const int masks = prototypes == tensors_.end() ? 0 : prototypes->second.shape[1];
        const cv::Mat raw = values("output0").reshape(1, tensors_.at("output0").shape[1]);
        std::vector<Detection> candidates;
        for (int row = 4; row < raw.rows - masks; ++row)  // a box counts for each class that it may be
            for (int anchor = 0; anchor < raw.cols; ++anchor)
                if (const float score = raw.at<float>(row, anchor); score > conf) {
                    const float width = raw.at<float>(2, anchor), height = raw.at<float>(3, anchor);
                    const float x = raw.at<float>(0, anchor) - width / 2, y = raw.at<float>(1, anchor) - height / 2;
                    candidates.push_back({{x, y, width, height}, score, row - 4});
                }
        return nms(std::move(candidates), iou, false);
    }
};

cv::Mat draw(cv::Mat image, const std::vector<Detection>& detections, const std::map<int, std::string>& names) {
    for (const auto& [box, score, label] : detections) {
        const cv::Scalar colour(label * 67 % 200, label * 131 % 200, label * 29 % 200);
        const std::string name = names.count(label) ? names.at(label) : std::to_string(label);
        cv::rectangle(image, box, colour, 2);
        cv::putText(image, name + cv::format(" %.2f", score), box.tl() + cv::Point2f(0, box.y > 16 ? -4 : 12),
                    cv::FONT_HERSHEY_SIMPLEX, 0.5, colour, 1, cv::LINE_AA);
    }
    return image;
}

int main(int count, char** words) try {
    if (count < 3) throw std::runtime_error("usage: detect ENGINE SOURCE [FOLDER]");
    Detector detector(words[1]);
    const fs::path folder = count > 3 ? words[3] : "drawn";
    fs::create_directories(folder);
    std::vector<fs::path> paths{words[2]};
    if (fs::is_directory(words[2])) paths.assign(fs::directory_iterator(words[2]), {});
    std::sort(paths.begin(), paths.end());
    for (const fs::path& path : paths) {
        const cv::Mat image = cv::imread(path.string());
        if (image.empty() && paths.size() == 1) throw std::runtime_error("cannot read " + path.string());
        if (image.empty()) continue;  // something else in a folder of images
        const std::vector<Detection> detections = detector(image);
        for (const auto& [box, score, label] : detections)  // file, class, score, left, top, right, bottom
            std::printf("%s %d %.6f %.3f %.3f %.3f %.3f\n", path.filename().c_str(), label, score, box.x, box.y,
                        box.x + box.width, box.y + box.height);
        const std::string target = (folder / path.filename()).string();
        if (!cv::imwrite(target, draw(image, detections, detector.names))) throw std::runtime_error("cannot write " + target);
    }
} catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
}
