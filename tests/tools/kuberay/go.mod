module tools/kuberay

go 1.26.0

// Nothing is built from it: the tests take KubeRay's CRDs out of the module's folder, by `go mod download -json`.
require github.com/ray-project/kuberay/ray-operator v1.6.2
