// Command naming measures secure naming at 10,000 services and 100,000 endpoints: how long the engine takes for a pod or an endpoint that
// changes, until the new list is in the index, against making everything anew in the same run; and what memory all of it takes. The target
// holds for processor time: on a machine that others use, too, one change in thousands waits for its turn for longer than all others take.
//
// It refuses to measure changes that do not come out right.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/chancery-project/chancery/test/bench/parts"
	"github.com/chancery-project/chancery/trust"
	"github.com/chancery-project/chancery/trust/naming"
)

// Targets of DESIGN.md.
const (
	targetChange = time.Millisecond
	targetMemory = 200 // MB
)

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "naming:", err)
		os.Exit(1)
	}
}

func run(args []string, out io.Writer) error {
	flags := flag.NewFlagSet("naming", flag.ContinueOnError)
	services := flags.Int("services", 10_000, "services, each with a ReplicaSet of its own account")
	endpoints := flags.Int("endpoints", 100_000, "pods, each an endpoint of one service; each tenth is of a StatefulSet, with labels of its own")
	changes := flags.Int("changes", 2_000, "pods that come and go")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *services < 1 || *endpoints < *services || *changes < 1 {
		return errors.New("there should be a service, an endpoint for each, and a change")
	}
	for _, namespaces := range []int{min(200, *services), 1} {
		w := world{*services, *endpoints / *services, namespaces}
		if err := w.measure(*changes, out); err != nil {
			return err
		}
		debug.FreeOSMemory()
	}
	return nil
}

// world is a cluster of some size. All of an object follows from its number.
type world struct{ services, pods, namespaces int }

func (w world) namespace(service int) string { return fmt.Sprintf("team-%04d", service%w.namespaces) }

func (w world) service(i int) *naming.Service {
	return &naming.Service{Namespace: w.namespace(i), Name: fmt.Sprintf("service-%05d", i), Selector: naming.LabelsOf(map[string]string{"app": fmt.Sprintf("service-%05d", i)})}
}

// pod has the labels of a pod of a mesh.
func (w world) pod(service, n int, account string) *naming.Pod {
	name := fmt.Sprintf("service-%05d", service)
	labels := map[string]string{
		"app": name, "version": "v1", "pod-template-hash": fmt.Sprintf("%010x", service), "app.kubernetes.io/managed-by": "Helm", "app.kubernetes.io/name": name,
		"security.istio.io/tlsMode": "istio", "service.istio.io/canonical-name": name, "service.istio.io/canonical-revision": "v1",
	}
	if n%10 == 9 {
		labels["statefulset.kubernetes.io/pod-name"] = fmt.Sprintf("%s-%d", name, n)
	}
	return &naming.Pod{
		Namespace: w.namespace(service), Name: fmt.Sprintf("%s-%010x-%05x", name, service, n), UID: uid(service, n), Account: account, Labels: naming.LabelsOf(labels),
	}
}

func uid(service, n int) naming.UID { return naming.UIDOf(fmt.Sprintf("%d/%d", service, n)) }

func account(service int) string { return fmt.Sprintf("account-%05d", service) }

// slice has the endpoints of a service, and one more where a pod came.
func (w world) slice(service int, more bool) *naming.Slice {
	s := &naming.Slice{Namespace: w.namespace(service), Name: fmt.Sprintf("service-%05d-abcde", service), Service: fmt.Sprintf("service-%05d", service)}
	n := w.pods
	if more {
		n++
	}
	for i := range n {
		s.Pods = append(s.Pods, naming.PodRef{Name: fmt.Sprintf("service-%05d-%010x-%05x", service, service, i), UID: uid(service, i)})
	}
	return s
}

// open makes an engine that has read the world.
func (w world) open(changed func([]string)) (*naming.Engine, error) {
	td, err := trust.ParseDomain("cluster.local")
	if err != nil {
		return nil, err
	}
	e, err := naming.New(naming.Config{Clusters: []naming.ClusterConfig{{Name: "c", Domain: td}}, ClusterDomain: "cluster.local", RootNamespace: "istio-system", Changed: changed})
	if err != nil {
		return nil, err
	}
	var services, slices, pods []naming.Object
	for i := range w.services {
		services, slices = append(services, w.service(i)), append(slices, w.slice(i, false))
		for n := range w.pods {
			pods = append(pods, w.pod(i, n, account(i)))
		}
	}
	c := e.Cluster("c")
	for kind, all := range map[naming.Kind][]naming.Object{naming.KindService: services, naming.KindSlice: slices, naming.KindPod: pods, naming.KindEntry: nil, naming.KindWorkload: nil} {
		c.Replace(kind, all)
	}
	return e, nil
}

func (w world) measure(changes int, out io.Writer) error {
	before := heap()
	told := 0
	e, err := w.open(func(s []string) { told += len(s) })
	if err != nil {
		return err
	}
	held := heap() - before
	memory, err := parts.ReadMemory(os.Getpid())
	if err != nil {
		return err
	}
	fmt.Fprintf(out, "world services=%d endpoints=%d namespaces=%d\n", w.services, w.services*w.pods, w.namespaces)
	fmt.Fprintf(out, "memory held=%.1fMB process private=%.1fMB with the lists that were read (target %d MB: %s)\n", float64(held)/1e6, memory.Private, targetMemory, verdict(memory.Private < targetMemory))
	all, worked, err := w.change(e, changes)
	if err != nil {
		return err
	}
	if told < 2*changes/2 {
		return fmt.Errorf("%d changes of lists were told", told)
	}
	begun := time.Now()
	if _, err := w.open(nil); err != nil {
		return err
	}
	full := time.Since(begun)
	p50, p99, most := spread(all)
	fmt.Fprintf(out, "change p50=%s p99=%s most=%s of %d\n", p50, p99, most, len(all))
	cpu50, cpu99, cpuMost := spread(worked)
	fmt.Fprintf(out, "change, processor time p50=%s p99=%s most=%s (target %s: %s)\n", cpu50, cpu99, cpuMost, targetChange, verdict(cpu99 < targetChange))
	fmt.Fprintf(out, "floor: everything anew %s, %.0f times a change\n", full.Round(time.Millisecond), float64(full)/float64(p50))
	runtime.KeepAlive(e)
	return nil
}

// spread sorts durations, and returns the middle, that which one in a hundred exceeds, and the longest.
func spread(all []time.Duration) (p50, p99, most time.Duration) {
	slices.Sort(all)
	return all[len(all)/2], all[len(all)*99/100], all[len(all)-1]
}

// change lets a pod of another account come to a service, as an endpoint too, and go again, many times. It returns how long each change took,
// and the processor's time of that, with what it had to help the garbage collector: the rest it waited for others on the machine.
func (w world) change(e *naming.Engine, changes int) (all, worked []time.Duration, err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	c := e.Cluster("c")
	timed := func(f func()) {
		used, begun := processorTime(), time.Now()
		f()
		all, worked = append(all, time.Since(begun)), append(worked, processorTime()-used)
	}
	for i := range changes {
		service := i * 7919 % w.services
		name := w.namespace(service) + "/" + w.service(service).Name
		pod, with, without := w.pod(service, w.pods, fmt.Sprintf("new-%d", i)), w.slice(service, true), w.slice(service, false)
		was := len(e.Naming().Allowed(name))
		timed(func() { c.Put(pod) })
		if is := len(e.Naming().Allowed(name)); is != was+1 {
			return nil, nil, fmt.Errorf("%d identities may serve %s after a pod came, %d before", is, name, was)
		}
		timed(func() { c.Put(with) })
		timed(func() { c.Put(without) })
		timed(func() { c.Drop(pod.Key()) })
	}
	return all, worked, nil
}

// processorTime is what this thread has used.
func processorTime() time.Duration {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t) // fails for clocks that there are not
	return time.Duration(t.Nano())
}

func heap() uint64 {
	debug.FreeOSMemory()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

func verdict(ok bool) string {
	if ok {
		return "met"
	}
	return "missed"
}
